"""Experiments for docs/guides/which-batch-norm.md: when does it matter who shares statistics?

`make evidence` runs them all and writes the figures, the tables and results/.
"""
