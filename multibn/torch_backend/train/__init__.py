"""Contexts and functions for the layers of a model in training."""
