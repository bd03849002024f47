"""The version of the package, which ranks compare."""

__version__ = "0.1.0"
