"""Experiments for docs/guides/which-batch-norm.md: when does it matter who shares statistics?

`make evidence` runs them all and writes the figures, the tables and results/.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = str(ROOT / "examples")  # has the network and the data of `make demo`
