"""One layer: see README."""
