"""The channels of an activation, and its sizes (N, C, S) in memory."""

import math
from functools import lru_cache
from itertools import accumulate, groupby
from operator import mul

from multibn import wire


def channels(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a per-channel array: the sizes of the axes that are not reduced."""
    return tuple(n for i, n in enumerate(shape) if i not in axis)


@lru_cache(maxsize=1024)
def sizes(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[tuple[int, ...], float, int, int]:
    """Return the per-channel shape, elements per channel, and lengths of both passes' payloads."""
    per_channel = channels(shape, axis)
    count, C = math.prod(shape[i] for i in axis), math.prod(per_channel)
    return per_channel, float(count), wire.forward_payload(C), wire.backward_payload(C)


@lru_cache(maxsize=1024)
def sizes_in_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Return sizes (N, C, S) of an array without empty axes; `axis`, that is N and S, is reduced.

    C is the product of the channel axes, N of the reduced axes with larger strides, S of the
    reduced axes with smaller strides; S is 1 if the channels come last. `strides` count elements.
    None if memory has gaps between elements, a reduced axis lies between channel axes, or the
    channel axes are not in order.
    """
    order = sorted((i for i, n in enumerate(shape) if n != 1), key=strides.__getitem__)
    dense = accumulate((shape[i] for i in order), mul, initial=1)
    blocks = [math.prod(shape[i] for i in part) for _, part in groupby(order, axis.__contains__)]
    if order and order[0] not in axis:
        blocks.insert(0, 1)  # S
    channel_axes = [i for i in order if i not in axis]
    has_gaps = any(strides[i] != stride for i, stride in zip(order, dense, strict=False))
    if has_gaps or len(blocks) > 3 or channel_axes != sorted(channel_axes, reverse=True):
        return None
    S, C, N = blocks + [1] * (3 - len(blocks))
    return N, C, S
