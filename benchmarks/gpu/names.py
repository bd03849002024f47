"""The variable that tells the processes of `--stand-ins` to use stand-ins."""

STAND_INS = "MULTIBN_GPU_STAND_INS"
