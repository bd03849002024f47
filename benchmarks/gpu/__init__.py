"""The GPU path, checked and timed by one command: `python -m benchmarks.gpu`."""
