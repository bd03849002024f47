"""The passes as Triton kernels; `cuda` launches them.

The kernels see an activation as it lies in memory: `(outer, channels, inner)`, where inner is 1 if
the channels come last. A tile is ROWS x COLS elements: of (outer, inner) for one channel, or of
(outer, channels) if CHANNELS_LAST. A per-channel value broadcasts against a tile: its shape is
`(1, 1)`, or `(1, COLS)` if CHANNELS_LAST.

A program handles one block of channels, and in this block `tiles_per_program` tiles in a row, its
split. Each element of the tile has its own sum in DTYPE, of one addition per tile; these sums are
added up in float64 at the end. Offsets are 64 bits wide.

Arithmetic on per-channel values is float64, whatever the dtype of weight and bias; numbers come as
in `_triton_steps`.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

import triton
import triton.language as tl
from triton.language import constexpr

from multibn.kernels._triton_steps import number, store_packed


@triton.jit
def moments(
    x, partials,
    outer, channels, inner, blocks, tiles_per_program, splits,
    ROWS: constexpr, COLS: constexpr, CHANNELS_LAST: constexpr, DTYPE: constexpr,
):  # fmt: skip
    """Moments of each split, from sums about the mean of its first tile.

    `partials`, `(3, channels, splits)` in float64, are count, mean, and sum of squares about it.

    The relative error of the variance is at most one rounding per tile for any data: if the first
    tile's mean is far from the other tiles' means, the distance itself is part of the variance.
    """
    block, split, channel, exists = _place(channels, blocks, COLS, CHANNELS_LAST)
    first = split * tiles_per_program
    offsets, inside, count = _tile(first, block, outer, channels, inner, ROWS, COLS, CHANNELS_LAST)
    centre = _sum(tl.load(x + offsets, inside, 0.0).to(DTYPE), CHANNELS_LAST)
    centre /= count.to(DTYPE)
    sum_d = tl.zeros((ROWS, COLS), DTYPE)
    sum_dd = tl.zeros((ROWS, COLS), DTYPE)
    total = tl.zeros((), tl.int64)
    for i in range(tiles_per_program):
        offsets, inside, count = _tile(
            first + i, block, outer, channels, inner, ROWS, COLS, CHANNELS_LAST
        )
        d = tl.where(inside, tl.load(x + offsets, inside, 0.0).to(DTYPE) - centre, 0.0)
        sum_d += d
        sum_dd += d * d
        total += count
    n = total.to(tl.float64)
    difference = _sum(sum_d.to(tl.float64), CHANNELS_LAST) / n
    squares = _sum(sum_dd.to(tl.float64), CHANNELS_LAST) - n * difference * difference
    out = partials + channel * splits + split
    tl.store(out, n, exists)
    tl.store(out + channels * splits, centre.to(tl.float64) + difference, exists)
    tl.store(out + 2 * channels * splits, squares, exists)


@triton.jit
def merge_moments(partials, mean, var, channels, splits, BLOCK: constexpr):
    channel, m, v = _merged_moments(partials, channels, splits, BLOCK)
    tl.store(mean + channel, m)
    tl.store(var + channel, v)


@triton.jit(do_not_specialize=["weight", "count"])
def merge_and_pack_moments(
    partials, packed, weight: tl.int64, count: tl.int64, channels, splits, BLOCK: constexpr
):
    """`merge_moments` and `_triton_steps.pack` of mean and mean of squares."""
    channel, m, v = _merged_moments(partials, channels, splits, BLOCK)
    store_packed(packed, channel, m, v + m * m, weight, count, channels)


@triton.jit(do_not_specialize=["eps"])
def normalize(
    x, mean, var, weight, bias, residual, y, eps: tl.int64,
    outer, channels, inner, blocks, tiles_per_program,
    ROWS: constexpr, COLS: constexpr, CHANNELS_LAST: constexpr, DTYPE: constexpr, RELU: constexpr,
):  # fmt: skip
    """`weight`, `bias` and `residual` may be None."""
    block, split, channel, exists = _place(channels, blocks, COLS, CHANNELS_LAST)
    centre, remainder = _round(tl.load(mean + channel, exists, 0.0), DTYPE)
    a = _times(_invstd(var, channel, exists, eps), weight, channel, exists)
    b = -remainder * a
    if bias is not None:
        b += tl.load(bias + channel, exists, 0.0).to(tl.float64)
    a = a.to(DTYPE)
    b = b.to(DTYPE)
    for i in range(tiles_per_program):
        offsets, inside, _ = _tile(
            split * tiles_per_program + i, block, outer, channels, inner, ROWS, COLS, CHANNELS_LAST
        )
        d = tl.load(x + offsets, inside).to(DTYPE) - centre
        v = d * a + b
        if residual is not None:
            v += tl.load(residual + offsets, inside).to(DTYPE)
        if RELU:
            v = tl.where(v < 0.0, 0.0, v)  # a NaN stays
        tl.store(y + offsets, v, inside)


@triton.jit
def backward_sums(
    dy, x, mean, partials,
    outer, channels, inner, blocks, tiles_per_program, splits,
    ROWS: constexpr, COLS: constexpr, CHANNELS_LAST: constexpr, DTYPE: constexpr,
):  # fmt: skip
    """Each split's sums of `dy` and of `dy * (x - mean)`: `partials`, `(2, channels, splits)`."""
    block, split, channel, exists = _place(channels, blocks, COLS, CHANNELS_LAST)
    centre, remainder = _round(tl.load(mean + channel, exists, 0.0), DTYPE)
    sum_dy = tl.zeros((ROWS, COLS), DTYPE)
    sum_dy_d = tl.zeros((ROWS, COLS), DTYPE)
    for i in range(tiles_per_program):
        offsets, inside, _ = _tile(
            split * tiles_per_program + i, block, outer, channels, inner, ROWS, COLS, CHANNELS_LAST
        )
        g = tl.load(dy + offsets, inside, 0.0).to(DTYPE)
        d = tl.where(inside, tl.load(x + offsets, inside, 0.0).to(DTYPE) - centre, 0.0)
        sum_dy += g
        sum_dy_d += g * d
    first = _sum(sum_dy.to(tl.float64), CHANNELS_LAST)
    second = _sum(sum_dy_d.to(tl.float64), CHANNELS_LAST) - remainder * first
    out = partials + channel * splits + split
    tl.store(out, first, exists)
    tl.store(out + channels * splits, second, exists)


@triton.jit(do_not_specialize=["eps"])
def merge_sums(
    partials, var, sum_dy, sum_dy_xhat, eps: tl.int64, channels, splits, BLOCK: constexpr
):
    """A channel's sums over its splits; the sum of `dy * (x - mean)` times 1 / sqrt(var + eps)."""
    channel = tl.program_id(0).to(tl.int64)
    sums = partials + channel * splits
    first = tl.zeros((BLOCK,), tl.float64)
    second = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, splits, BLOCK):
        i = start + tl.arange(0, BLOCK)
        first += tl.load(sums + i, i < splits, 0.0)
        second += tl.load(sums + channels * splits + i, i < splits, 0.0)
    tl.store(sum_dy + channel, tl.sum(first))
    invstd = _invstd(var, channel, channel < channels, eps)
    tl.store(sum_dy_xhat + channel, tl.sum(second) * invstd)


@triton.jit(do_not_specialize=["element_weight", "eps"])
def input_gradient(
    dy, x, mean, var, weight, element_weight, sum_dy, sum_dy_xhat, dx, eps: tl.int64,
    outer, channels, inner, blocks, tiles_per_program,
    ROWS: constexpr, COLS: constexpr, CHANNELS_LAST: constexpr, DTYPE: constexpr,
):  # fmt: skip
    """`weight` may be None."""
    block, split, channel, exists = _place(channels, blocks, COLS, CHANNELS_LAST)
    centre, remainder = _round(tl.load(mean + channel, exists, 0.0), DTYPE)
    invstd = _invstd(var, channel, exists, eps)
    scale = _times(invstd, weight, channel, exists)
    pull = -scale * number(element_weight)
    x_scale = pull * invstd * tl.load(sum_dy_xhat + channel, exists, 0.0)
    shift = (pull * tl.load(sum_dy + channel, exists, 0.0) - remainder * x_scale).to(DTYPE)
    dy_scale = scale.to(DTYPE)
    x_scale = x_scale.to(DTYPE)
    for i in range(tiles_per_program):
        offsets, inside, _ = _tile(
            split * tiles_per_program + i, block, outer, channels, inner, ROWS, COLS, CHANNELS_LAST
        )
        g = tl.load(dy + offsets, inside).to(DTYPE)
        d = tl.load(x + offsets, inside).to(DTYPE) - centre
        tl.store(dx + offsets, d * x_scale + g * dy_scale + shift, inside)


@triton.jit
def _place(channels, blocks, COLS: constexpr, CHANNELS_LAST: constexpr):
    """Block and split of this program, its channels, and which of these exist."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    if CHANNELS_LAST:
        channel = block * COLS + tl.arange(0, COLS)[None, :]
    else:
        channel = block + tl.zeros((1, 1), tl.int64)
    return block, program // blocks, channel, channel < channels


@triton.jit
def _tile(
    tile, block, outer, channels, inner, ROWS: constexpr, COLS: constexpr, CHANNELS_LAST: constexpr
):
    """Offsets of a tile, which are inside the activation, and how many per channel are inside."""
    if CHANNELS_LAST:
        row = tile * ROWS
        col = block * COLS
        start, width, stride = 0, channels, channels
    else:
        across = tl.cdiv(inner, COLS)
        row = tile // across * ROWS
        col = tile % across * COLS
        start, width, stride = block * inner, inner, channels * inner
    rows = row + tl.arange(0, ROWS)[:, None]
    cols = col + tl.arange(0, COLS)[None, :]
    count = tl.minimum(tl.maximum(outer - row, 0), ROWS)
    if not CHANNELS_LAST:
        count *= tl.minimum(inner - col, COLS)
    return start + rows * stride + cols, (rows < outer) & (cols < width), count


@triton.jit
def _merged_moments(partials, channels, splits, BLOCK: constexpr):
    """This program's channel; its mean and biased variance from its splits (Chan et al., 1979)."""
    channel = tl.program_id(0).to(tl.int64)
    counts = partials + channel * splits
    means = counts + channels * splits
    squares = means + channels * splits
    n = tl.zeros((BLOCK,), tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, splits, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(counts + i, i < splits, 0.0)
        n += count
        weighted += count * tl.load(means + i, i < splits, 0.0)
    total = tl.sum(n)
    mean = tl.sum(weighted) / total
    m2 = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, splits, BLOCK):
        i = start + tl.arange(0, BLOCK)
        d = tl.load(means + i, i < splits, 0.0) - mean
        m2 += tl.load(squares + i, i < splits, 0.0) + tl.load(counts + i, i < splits, 0.0) * d * d
    var = tl.sum(m2) / total
    return channel, mean, tl.where(var < 0.0, 0.0, var)  # a NaN stays


@triton.jit
def _invstd(var, channel, exists, eps):
    return 1.0 / tl.sqrt(tl.load(var + channel, exists, 1.0) + number(eps))


@triton.jit
def _times(scale, weight, channel, exists):
    if weight is not None:
        scale *= tl.load(weight + channel, exists, 0.0).to(tl.float64)
    return scale


@triton.jit
def _sum(v, CHANNELS_LAST: constexpr):
    """Per-channel sums of a tile."""
    v = tl.sum(v, 0, keep_dims=True)
    return v if CHANNELS_LAST else tl.sum(v, 1, keep_dims=True)


@triton.jit
def _round(mean, DTYPE: constexpr):
    """A float64 mean as a centre in DTYPE and a remainder, see `generic`."""
    centre = mean.to(DTYPE)
    return centre, mean - centre.to(tl.float64)
