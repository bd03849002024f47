"""What multibn costs, beside the layers it takes the place of: `python -m benchmarks`."""
