"""Texts for errors and warnings: layer names, lists of ranks, and lines on stderr."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from multibn import wire
from multibn._platform import launched_processes
from multibn._warnings import warn

# The methods on the call stack while a model or a layer runs.
_CALLS = {"__call__", "_call_impl", "forward"}


def find_module_path(
    part: object, kind: type, named_parts: Callable[[Any], Iterable[tuple[str, object]]], /
) -> str:
    """Return the path of `part` in the outermost running model of type `kind` that contains it.

    Return "" if there is none. `named_parts(model)` yields the paths and parts of a model.
    """
    frame = sys._getframe(1)
    running = []
    while frame is not None:
        # Before Python 3.13, reading `f_locals` keeps a frame's variables alive until the function
        # returns. So the variables of a training loop are not read.
        name, variables = frame.f_code.co_name, frame.f_code.co_varnames
        if name in _CALLS and variables[:1] == ("self",):
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, kind) and candidate is not part:
                running.append(candidate)
        frame = frame.f_back  # type: ignore[assignment]
    for model in reversed(running):
        # A part may have several paths, in a different order on each rank.
        if paths := [path for path, candidate in named_parts(model) if candidate is part]:
            return min(paths)
    return ""


def display_name(name: str) -> str:
    """Return a layer's name for messages: "layer 3" if the name is only an index."""
    return f"layer {name}" if name[:1].isdigit() else name


def group_ranks_by(answers: Iterable[str], preposition: str = "in") -> str:
    """Group ranks by their answers: "rank(s) [0, 2] in A; rank(s) [1] in B"."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(rank)
    return "; ".join(f"rank(s) {each} {preposition} {answer}" for answer, each in ranks.items())


def describe_ranks(marks: Sequence[float], size: int) -> str:
    """Describe the ranks whose bits are in the `marks`; see `multibn.wire`."""
    if size == 1:
        return "this process"
    ranks = wire.ranks_of(marks)
    return f"rank(s) {ranks} of {size}" if ranks else "some rank"


def raise_for_refusal(communicator: Any, marks: Sequence[float], place: str) -> NoReturn:
    """Raise because the ranks whose bits are in the `marks` rejected their input."""
    log_and_raise(
        RuntimeError,
        f"rank {communicator.rank} stops in {place}: the input was rejected on "
        f"{describe_ranks(marks, communicator.size)}. See the error on that rank.",
    )


def raise_for_sum(communicator: Any, got: str) -> NoReturn:
    """Raise because the `allreduce` of a user's own class does not sum."""
    log_and_raise(
        TypeError,
        f"`allreduce` of {type(communicator).__qualname__} must return the sum over "
        f"{communicator.size} ranks, an array like its argument: got {got}, on rank "
        f"{communicator.rank}. Correct this method.",
    )


SAME_LAYERS_ADVICE = (
    "All ranks must run the same layers in the same order with the same dtype, and all must be in "
    "training or all in evaluation."
)
# The advice if the ranks are in the backward passes of different layers.
UNUSED_LAYER_ADVICE = (
    "All ranks must run the same layers in the same order, also in backward. If a rank's loss does "
    "not use a layer, add 0 * unused.sum() to that loss, with `unused` the layer's output, or call "
    "the layer with an empty batch, layer(x[:0]).sum()."
)


def raise_for_places(texts: Iterable[str], advice: str = SAME_LAYERS_ADVICE) -> NoReturn:
    """Raise because the ranks are in different places, which the `texts` name."""
    log_and_raise(
        RuntimeError, f"the ranks are in different places: {group_ranks_by(texts)}. {advice}"
    )


_has_warned = False


def warn_if_launched(why: str, fix: str) -> None:
    """Warn, once, that this process shares no statistics although a launcher started several."""
    global _has_warned
    name, size = launched_processes()
    if size > 1 and not _has_warned:
        _has_warned = True
        warn(
            f"batch statistics are not synchronized, although the launcher started {size} "
            f"processes ({name}={size}): {why}. To share them, {fix}; to keep them local, pass "
            "multibn.SingleProcess()."
        )


def log_and_raise(kind: type[Exception], message: str) -> NoReturn:
    """Raise an error, and print its message as a line on stderr.

    The line is easy to find among the tracebacks of many ranks.
    """
    log_to_stderr(message)
    raise kind(message)


def log_to_stderr(message: str) -> None:
    """Print a line that begins with "multibn: "."""
    with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may have exited
        sys.stderr.flush()
        os.write(2, f"multibn: {message}\n".encode())


def uncaught() -> BaseException | None:
    """Return the exception that ended the program, for use at exit."""
    # Python stores an uncaught exception here. Interactive shells and test runners also store the
    # exceptions that they caught: these tracebacks begin in a frame that has a caller.
    trace = getattr(sys, "last_traceback", None)
    if trace is None or trace.tb_frame.f_back is not None:
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
