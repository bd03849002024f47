"""Python objects for other ranks, pickled: for first steps and error messages, not every step.

An object that cannot be pickled is a TypeError on all ranks.
"""

import contextlib
import pickle
from typing import Any

import numpy as np

from multibn.communicators.base import Communicator


def broadcast(obj: Any, communicator: Communicator, *, root: int) -> Any:
    """`obj` of rank `root`, on every rank. Collective: two allreduces."""
    (theirs,) = _exchanged(obj, communicator, [root])
    return theirs


def gather(obj: Any, communicator: Communicator) -> list[Any]:
    """`obj` of every rank, on every rank. Collective: two allreduces."""
    return _exchanged(obj, communicator, list(range(communicator.size)))


def _exchanged(obj: Any, communicator: Communicator, senders: list[int]) -> list[Any]:
    payloads = {}
    if communicator.rank in senders:
        payloads[senders.index(communicator.rank)] = _pickled(obj)
    lengths = np.zeros(len(senders))  # float64, which every communicator takes
    for row, payload in payloads.items():
        lengths[row] = len(payload)
    lengths = communicator.allreduce(lengths).astype(int)
    if not lengths.all():
        raise TypeError(
            "an object for other ranks must be picklable: that of rank(s) "
            f"{[senders[i] for i in np.flatnonzero(lengths == 0)]} of {communicator.size} is not."
        )
    contents = np.zeros((len(senders), lengths.max()))
    for row, payload in payloads.items():
        contents[row, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    contents = communicator.allreduce(contents).astype(np.uint8)
    return [
        pickle.loads(row[:length].tobytes()) for row, length in zip(contents, lengths, strict=True)
    ]


def _pickled(obj: Any) -> bytes:
    """Nothing for what cannot be pickled: the other ranks wait to be told."""
    with contextlib.suppress(Exception):
        return pickle.dumps(obj)
    return b""
