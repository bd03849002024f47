"""Comparison of layers with a float64 oracle, and of two models of different frameworks."""
