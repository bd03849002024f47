"""Warnings that point at the user's code."""

import sys
import warnings
from types import FrameType

# Packages whose frames stand between a warning and the user's call; graphs' code has no name.
_SKIPPED = {"", "multibn", "torch", "chainer", "importlib"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside multibn and the framework; "" gives no warning."""
    if not message:
        return
    frame = sys._getframe(1)
    while _module(frame).partition(".")[0] in _SKIPPED and frame.f_back:
        frame = frame.f_back
    # warn_explicit ignores a warning of a module that is None.
    where = frame.f_code.co_filename, frame.f_lineno, _module(frame) or "multibn"
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *where, registry)


def warn_or_raise(message: str, strict: bool) -> None:
    """Warn, or raise TypeError if `strict`, unless the message is empty."""
    if message and strict:
        raise TypeError(message)
    warn(message)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
