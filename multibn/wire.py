"""The layout of the messages in which the ranks share a layer's statistics.

A message is one vector of float64 numbers, whose sum over the ranks is all that is exchanged. Of a
layer with C channels, the payload is

- forward, 2C+2 numbers: `weight * mean`, `weight * meansqr`, `weight`, `count`, where `weight` is
  what the rank counts for;
- backward, 2C numbers: `sum_dy`, `sum_dy_xhat`.

A head stands before the payload: a fingerprint v and v**2. The fingerprint stands for the layer's
name, the phase, the number of channels and the dtype: all of W ranks have sent the same v if and
only if W * sum(v**2) = sum(v)**2 (Cauchy and Schwarz). The head has one place in all messages,
whatever their lengths, so that ranks in different places see that in the sum of their heads.

Where a rank's moments of a channel are not finite, the payload has the rank's mark in their place:
a power of two above all finite moments, so that the sum tells which ranks have sent a mark. A rank
that refuses its input sends its mark in place of the fingerprint.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multibn._arrays import array_namespace
from multibn._typing import Array

# Places in a layer's forward payload, after the 2C numbers of the moments.
WEIGHT, COUNT = 0, 1
_NUM_SCALARS = 2  # a layer's weight and count
HEAD = 2  # numbers before a payload: v and v**2
# Fingerprints are below 2**20: their squares are then summed exactly in float64 by 8192 ranks.
_FINGERPRINT_BITS = 20
# Larger moments are not finite, nor are sums of 8192 ranks above the second number.
LARGEST, LARGEST_SUM = 2.0**940, 2.0**960
# A sum of marks has a bit for each rank, which float64 holds exactly, whatever else is in the sum.
_FIRST_BIT, _NUM_BITS = 970, 50
NO_BIT = math.nan  # of the ranks that have no bit


class Message(NamedTuple):
    """Memory of a torch GPU for a message.

    A kernel that writes a layer's payload writes the rest of the memory, too: the head before the
    payload, and zeros behind it.
    """

    numbers: Array  # not initialised
    fingerprint: float  # the v of the head

    def write(self, payload: Array) -> "Message":
        """Fill the memory."""
        numbers, v = self
        end = HEAD + payload.shape[0]
        numbers[0], numbers[1] = v, v * v
        numbers[HEAD:end], numbers[end:] = payload, 0.0
        return self


def forward_payload(num_channels: int, /) -> int:
    """How many numbers a layer of so many channels sends forward, beside the head."""
    return 2 * num_channels + _NUM_SCALARS


def backward_payload(num_channels: int, /) -> int:
    """How many numbers a layer of so many channels sends backward, beside the head."""
    return 2 * num_channels


def length(num_channels: int, /) -> int:
    """How many numbers the longest message of a layer of so many channels has, the forward one."""
    return HEAD + forward_payload(num_channels)


def num_channels(phase: str, payload: int, /) -> int:
    """How many channels the layer has whose payload has so many numbers."""
    return (payload if phase == "backward" else payload - _NUM_SCALARS) // 2


def head(fingerprint: float, /) -> list[float]:
    """The numbers before the payload."""
    return [fingerprint, fingerprint * fingerprint]


def fingerprint(text: str, /) -> float:
    """A whole number that stands for `text`, the same on all ranks."""
    return float(zlib.crc32(text.encode()) >> (32 - _FINGERPRINT_BITS))


def all_equal(head: Sequence[float], size: int, /) -> bool:
    """Whether `size` ranks have sent one fingerprint and none a refusal, from the sum of heads."""
    total, total_of_squares = head
    return not is_refused(head) and int(size) * int(total_of_squares) == int(total) ** 2


def is_refused(head: Sequence[float], /) -> bool:
    """Whether a rank has refused its input, from the sum of heads."""
    return not abs(head[0]) < LARGEST_SUM


def rank_bit(rank: int, /) -> float:
    """The number that a rank sends in the place of moments that are not finite."""
    return 2.0 ** (_FIRST_BIT + rank) if rank < _NUM_BITS else NO_BIT


def rank_bits_in(summed: Any, /) -> list[float]:
    """The sums of marks that stand in place of moments, in a sum of payloads in host memory."""
    numbers = summed[:-_NUM_SCALARS]
    return numbers[~(np.abs(numbers) < LARGEST_SUM)].tolist()


def ranks_of(sums: Sequence[float], /) -> list[int]:
    """The ranks whose bits are set. A sum in which a rank without a bit has a part names none."""
    bits = [round(v / 2.0**_FIRST_BIT) for v in sums if math.isfinite(v)]
    return [rank for rank in range(_NUM_BITS) if any(v >> rank & 1 for v in bits)]


def concat(arrays: Sequence[Array], /) -> Array:
    """Arrays of one library as one vector, in the order of their elements."""
    xp = array_namespace(arrays[0])
    return xp.concat([a if a.ndim == 1 else xp.reshape(a, (-1,)) for a in arrays])
