"""Warnings that point at the user's code."""

import sys
import warnings

# Packages whose frames stand between a warning and the user's call.
_SKIPPED = {"multibn", "torch", "chainer", "importlib"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside multibn and the framework that runs the layer."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED and frame.f_back:
        frame = frame.f_back
    where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *where, registry)
