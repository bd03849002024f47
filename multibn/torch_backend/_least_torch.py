"""Refuses an absent or older torch before a layer imports a part that it lacks."""

_LEAST = "2.10"

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"multibn.torch needs torch {_LEAST} or later: no torch is installed. "
        "Run pip install torch.",
        name="torch",
    ) from error

if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, _LEAST.split("."))):
    raise ImportError(
        f"multibn needs torch {_LEAST} or later: torch {torch.__version__} is installed. "
        "Run pip install --upgrade torch."
    )
