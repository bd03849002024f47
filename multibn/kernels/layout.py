"""The channels of an activation, and its sizes (N, C, S) in memory."""

import math
from functools import lru_cache

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
    blocks = [(True, 1)]  # innermost first: (whether the axes are reduced, their size)
    channel_axes = []
    expected = 1
    for stride, i in sorted((strides[i], i) for i, n in enumerate(shape) if n != 1):
        if stride != expected:
            return None
        expected *= shape[i]
        reduced = i in axis
        if not reduced:
            channel_axes.append(i)
        if blocks[-1][0] == reduced:
            blocks[-1] = (reduced, blocks[-1][1] * shape[i])
        else:
            blocks.append((reduced, shape[i]))
    if len(blocks) > 3 or channel_axes != sorted(channel_axes, reverse=True):
        return None
    S, C, N = [size for _, size in blocks] + [1] * (3 - len(blocks))
    return N, C, S
