"""The passes as Triton kernels; `cuda` launches them.

The kernels see an activation as `outer` rows of `stride` elements in memory. A tile is ROWS x COLS
elements: some rows of one channel's plane, which is `width` elements of each row, or, with COLUMNS,
some columns of whole rows, whose width is the stride. A column is a channel if COLUMNS is 1, for
channels that come last; if it is 2, `inner` columns side by side are a channel's plane, of an odd
size, so that vectors of memory do not begin where planes do. A per-channel value broadcasts against
a tile: its shape is `(1, 1)`, or `(1, COLS)` with COLUMNS.

A program handles one block, a channel or COLS columns, and in this block `tiles_per_program` tiles
in a row, its split. Each element of the tile has its own sum in DTYPE, of one addition per tile;
these sums are added up pairwise, and those of all splits in float64 by `steps`. There, too,
the coefficients are made, once for each channel: many GPUs have a unit for float64 for 64 of their
units for float32. `coefficients`, `(5, channels)`, are centre, scale and shift, where the output is
`(x - centre) * scale + shift`, `invstd`, and the remainder, `mean - centre`. Offsets are 64 bits
wide.

A thread reads VECTOR elements at once, which begin at multiples of VECTOR; strides, steps and the
width of whole rows count such vectors. Planes need not begin there: passes that sum read the
vectors in which a plane begins and ends, and ignore elements of other planes. Tiles of such
planes are `step` apart, less than COLS. `mask`, bytes of the shape of `outer` rows of `inner`
elements, or None, says which elements count; the others may be anything. Sizes are not compile-time
constants, so that images of any size need the same few kernels.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

import triton
import triton.language as tl
from triton.language import constexpr

_HALF, _BRAIN = constexpr(2.0**-25), constexpr(2.0**-134)  # half the smallest float16 and bfloat16

_SIZES = (
    "outer", "width", "stride", "step", "inner", "channels", "blocks", "tiles_per_program",
    "splits",
)  # fmt: skip
_ANYWHERE = ("mask", "statistics", "summed")  # in memory


def _pass(function):
    """Decorate a kernel that serves all sizes, specialized on 16-byte alignment alone."""
    return triton.jit(do_not_specialize=(*_SIZES, *_ANYWHERE))(function)


@_pass
def moments(
    x, mask, partials,
    outer: tl.int64, width: tl.int64, stride: tl.int64, step: tl.int64, inner, channels: tl.int64,
    blocks: tl.int64, tiles_per_program: tl.int64, splits: tl.int64,
    ROWS: constexpr, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr, DTYPE: constexpr,
):  # fmt: skip
    """Write the sums of each split about the mean of its first tile.

    `partials`, `(4, splits, channels)`, are count, this mean, and the sums of `d = x - mean` and of
    `d * d`.

    The relative error of the variance is at most one rounding per tile for any data: if the first
    tile's mean is far from the other tiles' means, the distance itself is part of the variance.
    """
    block, first, channel, exists = _place(
        width, inner, blocks, tiles_per_program, COLS, COLUMNS, VECTOR
    )
    offsets, readable, inside, count = _tile(
        first, block, mask, outer, width, stride, step, inner, ROWS, COLS, COLUMNS, VECTOR
    )
    v = tl.where(inside, tl.load(x + offsets, readable, 0.0).to(DTYPE), 0.0)
    centre = _sum(v, COLUMNS) / tl.maximum(count, 1).to(DTYPE)
    sum_d = tl.zeros((ROWS, COLS), DTYPE)
    sum_dd = tl.zeros((ROWS, COLS), DTYPE)
    total = tl.zeros((), tl.int64)
    for i in range(tiles_per_program):
        offsets, readable, inside, count = _tile(
            first + i, block, mask, outer, width, stride, step, inner, ROWS, COLS, COLUMNS, VECTOR
        )
        v = tl.load(x + offsets, readable, 0.0).to(DTYPE)
        if mask is not None:  # noqa: SIM102  Triton takes None for a constant here only
            if total == 0:  # no element of an earlier tile counts
                of_tile = _sum(tl.where(inside, v, 0.0), COLUMNS)
                centre = of_tile / tl.maximum(count, 1).to(DTYPE)
        d = tl.where(inside, v - centre, 0.0)
        sum_d += d
        sum_dd += d * d
        total += count
    out = partials + first // tiles_per_program * channels + channel
    size = splits.to(tl.int64) * channels
    tl.store(out, total.to(DTYPE), exists)
    tl.store(out + size, centre, exists)
    tl.store(out + 2 * size, _sum(sum_d, COLUMNS), exists)
    tl.store(out + 3 * size, _sum(sum_dd, COLUMNS), exists)


@_pass
def normalize(
    x, mask, coefficients, residual, y,
    outer: tl.int64, width: tl.int64, stride: tl.int64, step: tl.int64, inner, channels: tl.int64,
    blocks: tl.int64, tiles_per_program: tl.int64, splits: tl.int64,
    ROWS: constexpr, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr, DTYPE: constexpr,
    RELU: constexpr,
):  # fmt: skip
    """Write the output; `residual` may be None."""
    block, first, channel, exists = _place(
        width, inner, blocks, tiles_per_program, COLS, COLUMNS, VECTOR
    )
    centre, scale, shift = _output_coefficients(coefficients, channel, channels, exists)
    for i in range(tiles_per_program):
        offsets, readable, inside, _ = _tile(
            first + i, block, mask, outer, width, stride, step, inner, ROWS, COLS, COLUMNS, VECTOR
        )
        d = tl.load(x + offsets, readable).to(DTYPE) - centre
        v = _output(d, scale, shift)
        if residual is not None:
            v += tl.load(residual + offsets, readable).to(DTYPE)
        if RELU:
            v = tl.where(v < 0.0, 0.0, v)  # a NaN stays
        if mask is not None:
            v = tl.where(inside, v, 0.0)
        tl.store(y + offsets, v, readable)


@_pass
def backward_sums(
    dy, x, y, mask, statistics, coefficients, partials,
    outer: tl.int64, width: tl.int64, stride: tl.int64, step: tl.int64, inner, channels: tl.int64,
    blocks: tl.int64, tiles_per_program: tl.int64, splits: tl.int64,
    ROWS: constexpr, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr, DTYPE: constexpr,
):  # fmt: skip
    """Write each split's sums of `dy` and of `dy * (x - mean)` to `partials`.

    The shape of `partials` is `(2, splits, channels)`.

    With a ReLU, `y` is its output, or None if the sign is recomputed from the coefficients. Without
    a ReLU both are None. The mean is rounded to DTYPE.
    """
    block, first, channel, exists = _place(
        width, inner, blocks, tiles_per_program, COLS, COLUMNS, VECTOR
    )
    centre = tl.load(statistics + channel, exists, 0.0).to(DTYPE)
    scale = centre
    shift = centre
    if coefficients is not None:
        centre, scale, shift = _output_coefficients(coefficients, channel, channels, exists)
    sum_dy = tl.zeros((ROWS, COLS), DTYPE)
    sum_dy_d = tl.zeros((ROWS, COLS), DTYPE)
    for i in range(tiles_per_program):
        offsets, readable, inside, _ = _tile(
            first + i, block, mask, outer, width, stride, step, inner, ROWS, COLS, COLUMNS, VECTOR
        )
        g = tl.where(inside, tl.load(dy + offsets, readable, 0.0).to(DTYPE), 0.0)
        d = tl.where(inside, tl.load(x + offsets, readable, 0.0).to(DTYPE) - centre, 0.0)
        if y is not None:
            g = tl.where(tl.load(y + offsets, readable, 0.0) > 0.0, g, 0.0)
        elif coefficients is not None:
            g = tl.where(_output(d, scale, shift) > _least(x), g, 0.0)
        sum_dy += g
        sum_dy_d += g * d
    out = partials + first // tiles_per_program * channels + channel
    tl.store(out, _sum(sum_dy, COLUMNS), exists)
    tl.store(out + splits.to(tl.int64) * channels, _sum(sum_dy_d, COLUMNS), exists)


@_pass
def input_gradient(
    dy, x, y, mask, coefficients, dx, dresidual, summed, statistics,
    outer: tl.int64, width: tl.int64, stride: tl.int64, step: tl.int64, inner, channels: tl.int64,
    blocks: tl.int64, tiles_per_program: tl.int64, splits: tl.int64,
    ROWS: constexpr, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr, DTYPE: constexpr,
    RELU: constexpr,
):  # fmt: skip
    """Write the gradient of `x`, from the sum of all ranks' payloads.

    With a ReLU, `y` is its output, or None if the sign is recomputed. `dresidual`, which may be
    None, gets the gradient before the ReLU.
    """
    block, first, channel, exists = _place(
        width, inner, blocks, tiles_per_program, COLS, COLUMNS, VECTOR
    )
    centre, scale, shift = _output_coefficients(coefficients, channel, channels, exists)
    invstd = tl.load(coefficients + 3 * channels + channel, exists, 0.0)
    remainder = tl.load(coefficients + 4 * channels + channel, exists, 0.0)
    # Per channel: the mean of `dy`, and the factor of `d` from the mean of `dy * xhat`.
    share = tl.load(statistics + (2 * channels + 1)).to(DTYPE)
    slope = share * tl.load(summed + channels + channel, exists, 0.0).to(DTYPE) * invstd
    mean_dy = share * tl.load(summed + channel, exists, 0.0).to(DTYPE) - remainder * slope
    for i in range(tiles_per_program):
        offsets, readable, inside, _ = _tile(
            first + i, block, mask, outer, width, stride, step, inner, ROWS, COLS, COLUMNS, VECTOR
        )
        g = tl.load(dy + offsets, readable).to(DTYPE)
        d = tl.load(x + offsets, readable).to(DTYPE) - centre
        if y is not None:
            g = tl.where(tl.load(y + offsets, readable) > 0.0, g, 0.0)
        elif RELU:
            g = tl.where(_output(d, scale, shift) > _least(x), g, 0.0)
        v = (g - mean_dy - d * slope) * scale
        if mask is not None:
            g, v = tl.where(inside, g, 0.0), tl.where(inside, v, 0.0)
        if dresidual is not None:
            tl.store(dresidual + offsets, g, readable)
        tl.store(dx + offsets, v, readable)


@triton.jit
def _place(
    width, inner, blocks, tiles_per_program, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr
):
    """Return this program's block and first tile, its channels, and which of them exist."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    if COLUMNS:
        col = block * COLS + tl.arange(0, COLS)[None, :]
        channel = col if COLUMNS == 1 else col // inner
        exists = col < width * VECTOR
    else:
        channel = block + tl.zeros((1, 1), tl.int64)
        exists = channel >= 0
    return block, program // blocks * tiles_per_program, channel, exists


@triton.jit
def _tile(
    tile, block, mask, outer, width, stride, step, inner,
    ROWS: constexpr, COLS: constexpr, COLUMNS: constexpr, VECTOR: constexpr,
):  # fmt: skip
    """Return a tile's offsets, load mask, element mask, and the number of elements per channel.

    Without COLUMNS and a mask, all that can be read counts if planes begin at multiples of VECTOR.
    """
    if COLUMNS:
        row = tile * ROWS
        start = block * COLS
        before = block * 0
        col = start % inner
        length = width.to(tl.int64) * VECTOR - start
    else:
        step = step.to(tl.int64) * VECTOR
        across = tl.cdiv(width, step)
        row = tile // across * ROWS
        col = tile % across * step
        before = block * width % VECTOR
        start = block * width // VECTOR * VECTOR + col
        length = tl.minimum(width - col, step)
    rows = row + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    count = tl.minimum(tl.maximum(outer - row, 0), ROWS)
    if not COLUMNS:
        count *= length
    offsets = start + rows * (stride.to(tl.int64) * VECTOR) + cols
    readable = (rows < outer) & (cols < tl.cdiv(before + length, VECTOR) * VECTOR)
    counts = readable & (cols >= before) & (cols < before + length)
    if mask is not None:
        place = (col + cols - before) % inner if COLUMNS else col + cols - before
        counts &= tl.load(mask + rows.to(tl.int64) * inner + place, counts, 0) != 0
        columns = tl.sum(counts.to(tl.int64), 0)
        count = tl.max(columns, 0) if COLUMNS else tl.sum(columns, 0)
    return offsets, readable, counts, count


@triton.jit
def _output_coefficients(coefficients, channel, channels, exists):
    at = coefficients + channel
    return (
        tl.load(at, exists, 0.0),
        tl.load(at + channels, exists, 0.0),
        tl.load(at + 2 * channels, exists, 0.0),
    )


@triton.jit
def _output(d, scale, shift):
    # One rounding in the forward and in the backward pass: the backward pass finds the same sign.
    return tl.fma(d, tl.broadcast_to(scale, d.shape), tl.broadcast_to(shift, d.shape))


@triton.jit
def _least(x):
    """Return the largest number that rounds to 0 in the dtype of an output."""
    dtype = x.dtype.element_ty
    return _HALF if dtype == tl.float16 else _BRAIN if dtype == tl.bfloat16 else 0.0


@triton.jit
def _sum(v, COLUMNS: constexpr):
    """Return the sums of a tile, for each channel."""
    v = tl.sum(v, 0, keep_dims=True)
    return v if COLUMNS else tl.sum(v, 1, keep_dims=True)
