"""Refuses an older torch before a layer imports a part that it lacks."""

import torch

_LEAST = 2, 10

if tuple(map(int, torch.__version__.split(".")[:2])) < _LEAST:
    raise ImportError(
        f"multibn needs torch {'.'.join(map(str, _LEAST))} or later: torch {torch.__version__} is "
        "installed. Run pip install --upgrade torch."
    )
