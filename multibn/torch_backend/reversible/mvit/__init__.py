"""The reversible MViT, a model of reversible blocks."""
