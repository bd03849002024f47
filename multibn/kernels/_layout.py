"""How an activation lies in memory: (N, C, S), whatever the order of its axes."""


def sizes_in_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Sizes (N, C, S) of an array without empty axes, of which the passes reduce N and S.

    C is the product of the axes that are not in `axis`, N of the reduced axes with larger strides,
    S of those with smaller ones; S is 1 if the channels come last. Strides are in elements. None if
    there are gaps between elements, if a reduced axis lies between axes of channels, or if the axes
    of channels are in another order.
    """
    blocks = [(True, 1)]  # from the last in memory: whether the axes are reduced, and their size
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
