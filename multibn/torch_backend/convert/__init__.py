"""Models that are converted to synchronized layers, and back."""
