"""Batch normalization whose statistics are shared between processes.

Functions of models, and layers, are in `multibn.torch` (the names that most users need),
`multibn.torch_backend` (all names) and `multibn.chainer_backend`. This module imports no framework.
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
    """`multibn.torch` and the backends, imported when they are first named."""
    if name in ("torch", "torch_backend", "chainer_backend"):
        return _import_module(f"multibn.{name}")
    raise AttributeError(
        f"module 'multibn' has no attribute {name!r}. Functions of models, and layers, are in "
        "`multibn.torch`, `multibn.torch_backend` and `multibn.chainer_backend`: write "
        f"`multibn.torch.{name}`, for example."
    )
