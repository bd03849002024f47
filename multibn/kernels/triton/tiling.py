"""Divide a pass over an activation among Triton's programs, see `passes`."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from multibn.kernels.layout import channels, sizes_in_memory
from multibn.wire import forward_payload

# The dtypes of activations, and the dtype of the arithmetic for each.
DTYPES = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32)
DTYPES[torch.float64] = torch.float64
_LANGUAGE = {torch.float32: tl.float32, torch.float64: tl.float64}
_TILE = 2048  # elements: 16 for each thread of Triton's 4 warps
_VECTOR = 16  # bytes that a thread reads at once
# Programs per multiprocessor. All programs of a reduction run at once; elementwise passes have more
# programs, for load balance.
_SUMS, _ELEMENTWISE = 4, 32
_MAX_TILES = 64  # of a program that sums; bounds the rounding error, see `passes.moments`
_PARTIALS = 0.1  # the most memory traffic that partial sums may add to a pass


class Tiling(NamedTuple):
    """How a pass over an activation is divided among programs, see `passes`."""

    programs: int
    sizes: tuple[int, ...]  # as in `passes`
    splits: int
    constants: dict[str, Any]
    known: dict[Any, Any]  # what `launch` has compiled


class Tilings(NamedTuple):
    """The passes over all activations of one dtype, shape, strides and device, masked or not."""

    shape: tuple[int, ...]  # of a per-channel tensor
    channels: int
    payload: int  # the length of a forward payload
    dtype: torch.dtype  # of the arithmetic
    device: torch.device
    sums: Tiling
    elementwise: tuple[Tiling, Tiling]  # without and with a ReLU


@lru_cache(maxsize=1024)
def tilings_of(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axis: tuple[int, ...],
    device: torch.device,
    is_masked: bool = False,
) -> Tilings | None:
    """Return the tilings; None if the kernels do not support such activations."""
    sizes = sizes_in_memory(shape, strides, axis)
    reduced = [strides[i] for i in axis if shape[i] > 1]
    # A channel's elements must have the same order in memory as a mask's.
    in_order = not is_masked or reduced == sorted(reduced, reverse=True)
    if sizes is None or 0 in shape or dtype not in DTYPES or not in_order:
        return None
    _, C, S = sizes
    multiprocessors = _multiprocessors(device)
    last = int(S == 1 and C > 1)
    sums = _sums(sizes, last, dtype, _SUMS * multiprocessors)
    columns = 2 if S % _vector(sizes, dtype) and S > 1 else last
    plain, relu = (
        tiling._replace(constants=tiling.constants | {"RELU": relu}, known={})
        for tiling in [_tiling(sizes, columns, dtype, _ELEMENTWISE * multiprocessors)]
        for relu in (False, True)
    )
    payload, arithmetic = forward_payload(C), DTYPES[dtype]
    return Tilings(channels(shape, axis), C, payload, arithmetic, device, sums, (plain, relu))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _sums(sizes: tuple[int, int, int], columns: int, dtype: torch.dtype, programs: int) -> Tiling:
    """Return a tiling for sums: as many programs as run at once, but not too many partial sums."""
    N, C, S = sizes
    # Four numbers of each split are written and read.
    partials, traffic = 2 * 4 * DTYPES[dtype].itemsize, N * S * dtype.itemsize
    splits = max(int(_PARTIALS * traffic / partials), 1)
    cols = 64
    while columns and cols * dtype.itemsize > 32 and triton.cdiv(C, cols) * splits < programs:
        cols //= 2  # 32 bytes are the least that a GPU reads from its memory
    return _tiling(sizes, columns, dtype, programs, cols, splits, _MAX_TILES)


def _tiling(
    sizes: tuple[int, int, int],
    columns: int,
    dtype: torch.dtype,
    programs: int,
    cols: int = 64,
    max_splits: int = 1 << 30,
    max_tiles: int = 1 << 30,
) -> Tiling:
    """Return a tiling with about this many programs; `cols` is for channels that come last."""
    N, C, S = sizes
    vector = _vector(sizes, dtype)
    width = C * S if columns else S
    # For planes that begin inside a vector.
    slack = 0 if columns or S % vector == 0 else vector
    cols = min(triton.next_power_of_2(width + slack), (512, cols, 256)[columns], _TILE)
    rows = min(triton.next_power_of_2(N), _TILE // cols)
    blocks = triton.cdiv(width, cols) if columns else C
    tiles = triton.cdiv(N, rows) * (1 if columns else triton.cdiv(S, cols - slack))
    per_program = max(triton.cdiv(tiles * blocks, programs), triton.cdiv(tiles, max_splits))
    per_program = min(per_program, tiles, max_tiles)
    splits = triton.cdiv(tiles, per_program)
    per_program = triton.cdiv(tiles, splits)  # equal shares: no program is left without tiles
    constants = {
        "ROWS": rows,
        "COLS": cols,
        "COLUMNS": columns,
        "VECTOR": vector,
        "DTYPE": _LANGUAGE[DTYPES[dtype]],
        "enable_fp_fusion": True,  # the default, but Triton 3.9 warns without it
    }
    width, step = (width // vector, 0) if columns else (S, (cols - slack) // vector)
    arguments = N, width, C * S // vector, step, S, C, blocks, per_program, splits
    return Tiling(blocks * splits, arguments, splits, constants, {})


def _vector(sizes: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return how many elements a thread reads at once; rows begin at multiples of this."""
    return math.gcd(sizes[1] * sizes[2], _VECTOR // dtype.itemsize)
