"""The layout of the messages in which the ranks share a layer's statistics.

A message is a vector of float64 numbers, which is summed over the ranks. For a layer with C
channels, the payload is

- forward, 2C+2 numbers: `weight * mean`, `weight * meansqr`, `weight`, `count`, where `weight` is
  the rank's weight in the statistics;
- backward, 2C numbers: `sum_dy`, `sum_dy_xhat`.

A head precedes the payload: a fingerprint v and v**2. The fingerprint is a hash of the layer's
name, the phase, the number of channels and the dtype. All W ranks have sent the same v if and only
if W * sum(v**2) = sum(v)**2 (Cauchy-Schwarz inequality). The head is at the start of every message,
whatever the message's length, so that the sum also reveals ranks that run different layers.

If a rank's moments of a channel are not finite, the payload has the rank's bit instead: a power of
two above all finite moments, so that the sum shows which ranks have sent their bits. A rank that
rejects its input sends its bit instead of the fingerprint.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multibn._arrays import array_namespace
from multibn._typing import Array

# Positions in a forward payload, after the 2C numbers of the moments.
WEIGHT, COUNT = 0, 1
_NUM_SCALARS = 2  # weight and count
HEAD = 2  # length of the head: v and v**2
# Fingerprints are below 2**20: float64 holds the sum of their squares over 8192 ranks exactly.
_FINGERPRINT_BITS = 20
# Moments above LARGEST count as not finite; so do sums over 8192 ranks above LARGEST_SUM.
LARGEST, LARGEST_SUM = 2.0**940, 2.0**960
# Each rank has one bit of the sum, which float64 holds exactly even if finite moments are added.
_FIRST_BIT, _NUM_BITS = 970, 50
NO_BIT = math.nan  # sent by ranks from _NUM_BITS on


class Message(NamedTuple):
    """GPU memory for a message, as a torch tensor.

    A kernel that writes a layer's payload also writes the rest of the memory: the head before the
    payload, and zeros after the payload.
    """

    numbers: Array  # uninitialized
    fingerprint: float  # the v of the head

    def write(self, payload: Array) -> "Message":
        """Write the head, the payload and zeros."""
        numbers, v = self
        end = HEAD + payload.shape[0]
        numbers[0], numbers[1] = v, v * v
        numbers[HEAD:end], numbers[end:] = payload, 0.0
        return self


def forward_payload(num_channels: int, /) -> int:
    """Return the length of a forward payload."""
    return 2 * num_channels + _NUM_SCALARS


def backward_payload(num_channels: int, /) -> int:
    """Return the length of a backward payload."""
    return 2 * num_channels


def length(num_channels: int, /) -> int:
    """Return the length of a layer's longest message: the head and a forward payload."""
    return HEAD + forward_payload(num_channels)


def num_channels(phase: str, payload: int, /) -> int:
    """Return the number of channels from the length of a payload."""
    return (payload if phase == "backward" else payload - _NUM_SCALARS) // 2


def head(fingerprint: float, /) -> list[float]:
    """Return the head of a message."""
    return [fingerprint, fingerprint * fingerprint]


def fingerprint(text: str, /) -> float:
    """Return a hash of `text`: an integer that is the same in every process."""
    return float(zlib.crc32(text.encode()) >> (32 - _FINGERPRINT_BITS))


def all_equal(head: Sequence[float], size: int, /) -> bool:
    """Return whether `size` ranks sent equal fingerprints and none refused; `head` is the sum."""
    total, total_of_squares = head
    return not is_refused(head) and int(size) * int(total_of_squares) == int(total) ** 2


def is_refused(head: Sequence[float], /) -> bool:
    """Return whether a rank has refused its input; `head` is the sum of heads."""
    return not abs(head[0]) < LARGEST_SUM


def rank_bit(rank: int, /) -> float:
    """Return the number that a rank sends instead of non-finite moments."""
    return 2.0 ** (_FIRST_BIT + rank) if rank < _NUM_BITS else NO_BIT


def rank_bits_in(summed: Any, /) -> list[float]:
    """Return the sums that contain ranks' bits; `summed` is a sum of payloads in host memory."""
    numbers = summed[:-_NUM_SCALARS]
    return numbers[~(np.abs(numbers) < LARGEST_SUM)].tolist()


def ranks_of(sums: Sequence[float], /) -> list[int]:
    """Return the ranks whose bits are set in finite sums; a rank without a bit makes a sum NaN."""
    bits = [round(v / 2.0**_FIRST_BIT) for v in sums if math.isfinite(v)]
    return [rank for rank in range(_NUM_BITS) if any(v >> rank & 1 for v in bits)]


def concat(arrays: Sequence[Array], /) -> Array:
    """Concatenate arrays of one library to a vector."""
    xp = array_namespace(arrays[0])
    return xp.concat([a if a.ndim == 1 else xp.reshape(a, (-1,)) for a in arrays])
