"""What acts on the layers of a model while it trains."""
