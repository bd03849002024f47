"""What ranks do together about a batch that one of them cannot use: errors, and batches skipped."""

import warnings
import weakref
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from multibn.communicators.base import Communicator
from multibn.communicators.people import fail, for_people


def _layer_of(communicator: Any) -> Any:
    """The `Conversation` of the layer that uses the communicator, or None."""
    while communicator is not None and not hasattr(communicator, "num_forward"):
        communicator = getattr(communicator, "wrapped", None)
    return communicator


def name_of(communicator: Any, /) -> str:
    """The name of the layer that uses the communicator, for people."""
    layer = _layer_of(communicator)
    return "a layer" if layer is None else for_people(layer.name)


# What a layer does with a batch that is not finite. None: "skip" for float16, else "raise".
Nonfinite: TypeAlias = Literal["raise", "skip", None]


def skips(communicator: Any, dtype: Any, /) -> bool:
    """Whether a layer skips a batch that is not finite; `dtype` is what the message announces."""
    layer = _layer_of(communicator)
    if layer is None:
        return False
    # "nonfinite" of a layer, "nonfinite of conv1.bn" and so on of several in one message.
    policies = {v for option, v in layer.options().items() if option.split()[0] == "nonfinite"}
    is_float16 = {*str(dtype).rpartition(".")[2].split(", ")} == {"float16"}
    return policies == {"skip"} or (is_float16 and "raise" not in policies)


# The layer that told of a skipped batch last, and how many forward messages it had sent by then.
_told: tuple[weakref.ref[Any], int] | None = None


def tell_of_skip(communicator: Any, finite: bool | None = None, /) -> None:
    """Warn that a layer skips a batch, once for all layers through which NaN goes in a step.

    `finite` says whether this rank's input is; None where nobody knows any more. Not collective.
    """
    global _told
    layer = _layer_of(communicator)
    assert layer is not None
    first = None if _told is None else _told[0]()
    if _told is not None and first is not None and first.num_forward == _told[1]:
        return
    _told = weakref.ref(layer), layer.num_forward
    where = {True: "another rank, which says so", False: "this rank", None: "some rank"}[finite]
    warnings.warn(
        f"rank {communicator.rank} of {communicator.size} has skipped a batch in "
        f"{name_of(layer)}, as all ranks have: the input has NaN, infinity or too large values on "
        f"{where}. The output is NaN, and no statistics have moved. A GradScaler skips such a "
        'step; without one, pass nonfinite="raise".',
        RuntimeWarning,
        stacklevel=2,
    )


def find_ranks(communicator: Any, flag: bool, /) -> list[int]:
    """The ranks that passed True. Collective, and no message of a layer.

    For the way to an error: the message has as many numbers as there are ranks.
    """
    while hasattr(communicator, "wrapped"):
        communicator = communicator.wrapped
    flags = np.zeros(communicator.size)
    flags[communicator.rank] = flag
    return [int(rank) for rank in np.flatnonzero(communicator.allreduce(flags))]


def raise_for_refusal(communicator: Communicator, *, refused: bool) -> None:
    """Find out together which ranks refused their input; the others raise. Collective."""
    ranks = find_ranks(communicator, refused)
    if not refused:
        fail(
            RuntimeError,
            f"rank {communicator.rank} cannot go on: the input of {name_of(communicator)} was "
            f"refused on rank(s) {ranks} of {communicator.size}. The error raised there says "
            "why.",
        )


def raise_for_nan_gradients(communicator: Communicator, has_nan: bool) -> None:
    """Raise on all ranks if the gradient of a layer's output has NaN on any of them.

    Without this, the gradient of the input is NaN on all ranks, and nobody is told where NaN came
    in. Collective, and no message of a layer: for debugging, on all ranks or on none.
    """
    ranks = find_ranks(communicator, has_nan)
    if ranks:
        fail(
            FloatingPointError,
            f"the gradient of the output of {name_of(communicator)} has NaN on rank(s) {ranks} of "
            f"{communicator.size}. Look for their origin in the layers after, and in the loss.",
        )


def raise_for_non_finite(communicator: Communicator, finite: bool) -> NoReturn:
    """Find out together on which ranks the moments are not finite, and raise. Collective."""
    ranks = find_ranks(communicator, not finite)
    fail(
        FloatingPointError,
        f"the batch statistics of {name_of(communicator)} are not finite: the input has NaN, "
        f"infinity or too large values on rank(s) {ranks} of {communicator.size}. Look for "
        "their origin in the layers before.",
    )
