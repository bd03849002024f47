"""How the kernels of `_cupy` are launched: compiled for some dtypes, and divided among blocks."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from multibn._typing import Array
from multibn.kernels._cupy import SOURCE
from multibn.kernels.layout import channels, sizes_in_memory

TYPES = {"float16": "half", "float32": "float", "float64": "double"}
_INDEX = {"uint32": "unsigned", "uint64": "unsigned long long"}
THREADS = 256  # of a block
_BLOCKS = 1024  # enough to fill any GPU
_NULL = np.uintp(0)  # an array that is not there


class Plan(NamedTuple):
    """How the passes over an activation are divided among blocks."""

    N: int
    C: int
    S: int
    shape: tuple[int, ...]  # of a per-channel array
    cols: int  # channels of a block of a reduction
    length: int  # elements of a channel in a split
    splits: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return self[:3]

    @property
    def size(self) -> int:
        return self.N * self.C * self.S

    @property
    def num_splits(self) -> Any:
        return np.int32(self.splits)

    @property
    def split_grid(self) -> tuple[int, int]:
        return -(-self.C // self.cols), self.splits

    @property
    def merge_grid(self) -> tuple[int, int]:
        return -(-self.C // 32), 1

    @property
    def channel_grid(self) -> tuple[int, int]:
        return -(-self.C // THREADS), 1

    @property
    def element_grid(self) -> tuple[int, int]:
        return -(-self.size // (4 * THREADS)), 1


class Kernels:
    """Launches the kernels for some dtypes and one plan."""

    def __init__(
        self,
        plan: Plan,
        x: Any,
        *,
        gradient: Any = None,
        parameter: str = "float32",
        running: str = "float32",
    ) -> None:
        self.plan = plan
        # A thread counts 4 elements beyond the last, a walk through a split one step of the block.
        self.index = np.uint32 if plan.size + 4 * THREADS < 2**32 else np.uint64
        gradient = x if gradient is None else gradient
        self._types = x.name, gradient.name, parameter, running, self.index.__name__

    def __call__(self, name: str, grid: tuple[int, int], *arguments: Any) -> None:
        converted = tuple(
            self.index(v) if type(v) is int else _NULL if v is None else v for v in arguments
        )
        _kernel(name, THREADS, *self._types)(grid, (THREADS,), converted)


@cache
def _kernel(name: str, *types: Any) -> Any:
    return _module(*types).get_function(name)


@cache
def _module(threads: int, *types: str) -> Any:
    *floating, index = types
    values = [*(TYPES[name] for name in floating), _INDEX[index], str(threads)]
    names = ("X", "G", "P", "R", "INDEX", "THREADS")
    macros = tuple(f"-D{n}={v}" for n, v in zip(names, values, strict=True))
    return cupy.RawModule(code=SOURCE, options=("--std=c++11", "--fmad=false", *macros))


def plan_of(x: Array, axis: tuple[int, ...]) -> Plan | None:
    """The plan for `x`; None if the kernels cannot take `x`."""
    return _plan(x.shape, x.strides, x.itemsize, axis) if x.dtype.name in TYPES else None


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, axis: tuple[int, ...]
) -> Plan | None:
    if 0 in shape:
        return None
    sizes = sizes_in_memory(shape, tuple(n // itemsize for n in strides), axis)
    if sizes is None:
        return None
    N, C, S = sizes
    cols = 32 if S == 1 else 1
    elements = N * S
    splits = max(min(_BLOCKS // -(-C // cols), elements // (4 * THREADS // cols)), 1)
    length = -(-elements // splits)
    return Plan(
        *sizes,
        shape=channels(shape, axis),
        cols=cols,
        length=length,
        splits=-(-elements // length),
    )
