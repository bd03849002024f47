"""Transports: one file for each library that moves bytes between processes."""
