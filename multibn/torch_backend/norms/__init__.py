"""Layers other than batch norm that share statistics between ranks."""
