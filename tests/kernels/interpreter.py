"""Triton's interpreter in two thirds of its time."""

from importlib import metadata
from typing import Any

import numpy as np

from tests.helpers import require


def takes_int_of_an_array() -> bool:
    """As Triton 3.6 does, and 3.9 does no more; NumPy 2.5 refuses this."""
    if not require.available("triton"):
        return False
    triton = tuple(int(n) for n in metadata.version("triton").split(".")[:2])
    return triton < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.5.0"


def patch_once() -> None:
    """Let the interpreter patch Triton's language at each launch, and not at each inner call.

    The launch has patched the language for all functions of its own module, and patches of Triton's
    library stay. To look for what is to be patched takes longer than most functions.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
