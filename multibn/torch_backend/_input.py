"""The input of one layer."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from multibn.step import Input as Input


def without_autocast(x: Any, /) -> AbstractContextManager[Any]:
    """A context in which operations on tensors like `x` keep their dtypes."""
    kind = "cpu" if x.is_cpu else x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


_NOTHING = nullcontext()
