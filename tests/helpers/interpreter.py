"""Triton's interpreter in two thirds of its time."""

from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """Let the interpreter patch Triton's language at each launch, and not at each inner call.

    The launch has patched the language for all functions of its own module, and patches of Triton's
    library stay. To look for what is to be patched takes longer than most functions.
    """
    patched = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
