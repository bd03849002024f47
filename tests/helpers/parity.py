"""Both layers over a communicator, against the oracle, in every case of `multibn parity`."""

import functools
from typing import Any

import numpy as np

from multibn import wire
from multibn.communicators import Communicator
from multibn.parity.cases import CASES, CHANNELS, Case
from multibn.parity.oracle import Array
from multibn.parity.worker import ADAPTERS, Error, compare, train
from tests.helpers import require
from tests.helpers.ranks import CountingCommunicator


def errors(adapter: str, case: Case, communicator: Communicator) -> list[Error]:
    """This rank's errors from the oracle that are not within bounds. Collective."""
    counting = CountingCommunicator(communicator)
    arrays = train(adapter, case, counting)
    if communicator.size > 1:  # one message forward and one backward; two means of gradients
        # Of float64, a mean far from 0 is taken by a second message forward.
        is_far = case.dtype == "float64" and case.mean > 100 * case.std
        again = adapter == "chainer" and case.recompute  # by F.forget, which keeps no statistics
        n = wire.length(CHANNELS)
        step = [n] * (1 + is_far + again) + [wire.HEAD + 2 * CHANNELS] + [CHANNELS] * 2
        assert counting.take() == step * case.steps
    assert arrays["0/y"].dtype == arrays["0/dx"].dtype == np.dtype(case.dtype)
    found = compare(adapter, case, arrays, communicator.rank, communicator.size)
    return [error for error in found if not error.ratio <= 1]


def check(adapter: str, communicator: Communicator) -> None:
    """Train all cases, and look at errors once all communication is over."""
    assert [errors(adapter, case, communicator) for case in CASES] == [[]] * len(CASES)


def checks() -> dict[str, Any]:
    """A check for each installed framework, by its name."""
    return {
        f"check_{adapter}_against_the_oracle": functools.partial(check, adapter)
        for adapter in frameworks()
    }


def frameworks() -> list[str]:
    """Those that are installed."""
    return [name for name in ADAPTERS if require.available(name)]


def batches(split: str, size: int, dtype: str, seed: int) -> tuple[list[Array], list[Array]]:
    """All ranks' inputs and output gradients; the same on every rank."""
    xs, dys, _ = Case("batches", dtype=dtype, split=split, spatial=(5, 3)).batches(size, seed)
    return xs, dys
