"""Experiments: when does it matter who shares statistics?

`make evidence` runs them all and writes the figures, the tables and results/.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))  # has the network and the data of `make demo`
