"""Raise on all ranks, or skip the batch on all ranks, if one rank's batch is not finite."""

import math
import time
from typing import Any

from multibn import wire
from multibn._typing import HostArray
from multibn._warnings import warn
from multibn.communicators.diagnostics import describe_ranks, display_name, log_and_raise
from multibn.communicators.handshake import all_ranks_agree


def layer_of(communicator: Any) -> Any:
    """Return the `LayerCommunicator` behind a layer's communicator; None for any other."""
    return getattr(communicator, "layer", None)


def name_of(communicator: Any, /) -> str:
    """Return the name, for error messages, of the layer that uses the communicator."""
    layer = layer_of(communicator)
    return "a layer" if layer is None else display_name(layer.name)


def skips(communicator: Any, dtype: Any, /) -> bool:
    """Whether a layer skips a batch that is not finite; `dtype` is the dtype of the activations."""
    layer = layer_of(communicator)
    if layer is None:
        return False
    nonfinite = layer.options().get("nonfinite")
    is_float16 = str(dtype).rpartition(".")[2] == "float16"
    return nonfinite == "skip" or (is_float16 and nonfinite is None)


_SECONDS_BETWEEN_WARNINGS = 1.0  # the layers after a skip also skip the batch
_warned_at = -math.inf


def raise_if_nonfinite(
    communicator: Any, dtype: Any, summed: HostArray, /, earlier: object = None
) -> None:
    """Raise if a sum of payloads shows that a rank's batch is not finite.

    If the layer skips such batches, warn instead, at most once a second. `earlier` names the call
    if the payloads are of an earlier one.
    """
    global _warned_at
    marks = wire.rank_bits_in(summed)
    if not marks:
        return
    where = describe_ranks(marks, communicator.size)
    if not skips(communicator, dtype):
        name = f"an earlier call, {earlier}," if earlier else name_of(communicator)
        log_and_raise(
            FloatingPointError,
            f"the batch statistics of {name} are not finite: the input contains NaN, infinity or "
            f"values that overflow on {where}. Check the preceding layers.",
        )
    now = time.monotonic()
    if now - _warned_at < _SECONDS_BETWEEN_WARNINGS or getattr(communicator, "repeats", False):
        return
    _warned_at = now
    warn(
        f"rank {communicator.rank} of {communicator.size} has skipped a batch in "
        f"{name_of(communicator)}, on all ranks: the input contained NaN, infinity or values that "
        f"overflow on {where}. The output is NaN, and the running statistics are unchanged. A "
        'GradScaler skips such a step; without one, pass nonfinite="raise".',
        RuntimeWarning,
    )


def raise_for_nan_gradients(communicator: Any, has_nan: bool) -> None:
    """Raise on all ranks if the gradient of a layer's output has NaN on any of them.

    Otherwise the gradient of the input is NaN on all ranks, and nothing shows which rank caused it.
    Collective, with a message of its own: a debugging aid to enable on all ranks or on none.
    """
    where = f"the gradient of the output of {name_of(communicator)}"
    own = wire.rank_bit(communicator.rank) if has_nan else 0.0
    _, mark = all_ranks_agree(
        communicator, "find_nan", text=f"the search for NaN in {where}", mark=own
    )
    if mark:
        log_and_raise(
            FloatingPointError,
            f"{where} has NaN on {describe_ranks([mark], communicator.size)}. Check the "
            "following layers and the loss.",
        )
