"""Raise ImportError if torch is missing or too old, before other modules import torch."""

_MINIMUM = "2.10"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"multibn.torch needs torch {_MINIMUM} or later: no torch is installed. "
        "Run pip install torch.",
        name="torch",
    ) from error

if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, _MINIMUM.split("."))):
    raise ImportError(
        f"multibn needs torch {_MINIMUM} or later: torch {torch.__version__} is installed. "
        "Run pip install --upgrade torch."
    )
