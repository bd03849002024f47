"""Values for other ranks: for first steps and error messages, not every step.

Names, places and numbers travel as JSON, which is only read. `broadcast_object` alone pickles, for
batches of the user's: whoever can send a pickle can run any code in the process that loads it.
"""

import contextlib
import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from multibn.communicators.base import Communicator


def gather(value: Any, communicator: Communicator) -> list[Any]:
    """`value`, which JSON can hold, of every rank, on every rank. Collective: two allreduces."""
    ranks = range(communicator.size)
    return [
        json.loads(each) for each in _exchanged(json.dumps(value).encode(), communicator, ranks)
    ]


def broadcast_object(obj: Any, communicator: Communicator, *, root: int) -> Any:
    """`obj` of rank `root`, pickled, on every rank. Collective: two allreduces.

    Raises TypeError on all ranks if the object cannot be pickled.
    """
    data = b""  # of what cannot be pickled: the other ranks wait to be told
    if communicator.rank == root:
        with contextlib.suppress(Exception):
            data = pickle.dumps(obj)
    (theirs,) = _exchanged(data, communicator, [root])
    if not theirs:
        raise TypeError(
            "an object for other ranks must be picklable: that of rank(s) "
            f"{[root]} of {communicator.size} is not."
        )
    return pickle.loads(theirs)


def _exchanged(data: bytes, communicator: Communicator, senders: Sequence[int]) -> list[bytes]:
    """The `data` of each of the `senders`."""
    lengths = np.zeros(len(senders))  # float64, which every communicator takes
    if communicator.rank in senders:
        row = senders.index(communicator.rank)
        lengths[row] = len(data)
    lengths = communicator.allreduce(lengths).astype(int)
    contents = np.zeros((len(senders), lengths.max()))
    if communicator.rank in senders:
        contents[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    contents = communicator.allreduce(contents).astype(np.uint8)
    return [row[:length].tobytes() for row, length in zip(contents, lengths, strict=True)]
