"""The reversible MViT, built of reversible blocks."""
