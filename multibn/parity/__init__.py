"""Compares the layers of both frameworks with a float64 oracle and with each other."""
