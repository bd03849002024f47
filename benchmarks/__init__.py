"""The cost of multibn beside the layers that it replaces: `python -m benchmarks`."""
