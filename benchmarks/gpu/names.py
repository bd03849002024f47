"""Whether this process uses stand-ins, told by a variable."""

import os

STAND_INS = "MULTIBN_GPU_STAND_INS"  # "1" in the processes of `--stand-ins`


def on_stand_ins() -> bool:
    return os.environ.get(STAND_INS) == "1"
