"""Batch normalization whose statistics are shared between processes.

`multibn.torch`, `multibn.flax` and `multibn.chainer` have the layers and the functions for models.
This module imports no framework.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from multibn._version import __version__ as __version__
from multibn.communicators import Communicator as Communicator
from multibn.communicators import CommunicatorLike as CommunicatorLike
from multibn.communicators import Group as Group
from multibn.communicators import SingleProcess as SingleProcess
from multibn.communicators import as_communicator as as_communicator
from multibn.engine import LayerStatistics as LayerStatistics
from multibn.engine import observing as observing


def __getattr__(name: str) -> _Any:
    """Import the module of a framework on first access."""
    if name.removesuffix("_backend") in ("torch", "flax", "chainer"):
        return _import_module(f"multibn.{name}")
    raise AttributeError(
        f"module 'multibn' has no attribute {name!r}. Layers and functions for models are in "
        f"`multibn.torch`, `multibn.flax` and `multibn.chainer`: for example, write "
        f"`multibn.torch.{name}`."
    )
