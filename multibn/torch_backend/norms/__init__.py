"""Layers beside batch norm that share statistics over ranks."""
