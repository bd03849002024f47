"""Values for other ranks: for first steps and error messages, not every step.

The values travel as JSON, which is only read.
"""

import json
from typing import Any

import numpy as np

from multibn.communicators.base import Communicator


def gather(value: Any, communicator: Communicator) -> list[Any]:
    """`value`, which JSON can hold, of every rank, on every rank. Collective: two allreduces."""
    data = json.dumps(value).encode()
    rank, size = communicator.rank, communicator.size
    lengths = np.zeros(size)  # float64, which every communicator takes
    lengths[rank] = len(data)
    lengths = communicator.allreduce(lengths).astype(int)
    contents = np.zeros((size, lengths.max()))
    contents[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    contents = communicator.allreduce(contents).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(contents, lengths, strict=True)]
