"""CuPy's part that launches CUDA source, on the host: the source is compiled by g++.

Each thread of a block is a thread of the process, and `__syncthreads` is a barrier; a kernel
without shared memory runs in one thread. Arrays are NumPy's. What a GPU rounds, compiles or orders
otherwise is not seen here.
"""

import contextlib
import ctypes
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multibn import _arrays

_PRELUDE = r"""
#include <barrier>
#include <cmath>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>
struct Place { unsigned x, y; };
static thread_local Place threadIdx, blockIdx;
static Place blockDim, gridDim;
static std::barrier<> *barrier_of_block;
#define __global__
#define __device__
#define __shared__ static
#define __syncthreads() barrier_of_block->arrive_and_wait()
using half = _Float16;
inline double wide(half v) { return v; }
inline void put(half *p, double v) { *p = (half)v; }
using std::sqrt;
"""
_POSTLUDE = r"""
template <class... A, size_t... I>
static void call(void (*kernel)(A...), void **a, std::index_sequence<I...>) {
    kernel(*(A *)a[I]...);
}
template <class... A>
static void launch(
    void (*kernel)(A...), bool waits, unsigned x, unsigned y, unsigned threads, void **a
) {
    blockDim = {threads, 1};
    gridDim = {x, y};
    if (!waits) {
        for (unsigned i = 0; i < x * y * threads; ++i) {
            threadIdx = {i % threads, 0};
            blockIdx = {i / threads % x, i / threads / x};
            call(kernel, a, std::index_sequence_for<A...>{});
        }
        return;
    }
    std::barrier<> barrier(threads);
    barrier_of_block = &barrier;
    std::vector<std::thread> block;
    for (unsigned t = 0; t < threads; ++t) block.emplace_back([=, &barrier] {
        for (unsigned i = 0; i < x * y; ++i) {
            threadIdx = {t, 0};
            blockIdx = {i % x, i / x};
            call(kernel, a, std::index_sequence_for<A...>{});
            barrier.arrive_and_wait();
        }
    });
    for (auto &t : block) t.join();
    barrier_of_block = nullptr;
}
"""


class ndarray(np.ndarray):
    """An array of NumPy's that is told from others."""

    def get(self) -> Any:
        return np.array(self)


class RawModule:
    """Compiles the source; `launches` are the names of all kernels that were launched."""

    launches: list[str] = []

    def __init__(self, *, code: str, options: Sequence[str]) -> None:
        runs = "".join(
            f'extern "C" void run_{name}(unsigned x, unsigned y, unsigned t, void **a) '
            f"{{ launch({name}, {int('__shared__' in body)}, x, y, t, a); }}\n"
            for name, body in re.findall(r"__global__ void (\w+)(.*?\n}\n)", code, re.S)
        )
        macros = [option for option in options if option.startswith("-D")]
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
        with tempfile.TemporaryDirectory() as directory:
            source, library = Path(directory, "a.cpp"), Path(directory, "a.so")
            source.write_text(_PRELUDE + code + _POSTLUDE + runs)
            command = ["g++", *flags, "-Wall", "-Werror", *macros, str(source), "-o", str(library)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> Any:
        function = self._library[f"run_{name}"]

        def run(grid: tuple[int, int], block: tuple[int], arguments: Sequence[Any]) -> None:
            self.launches.append(name)
            # As CuPy passes them: an array by its address, a number by its dtype.
            values = [np.uintp(v.ctypes.data) if v.ndim or isinstance(v, np.ndarray) else v
                      for v in arguments]  # fmt: skip
            memory = [np.array(v) for v in values]
            addresses = (ctypes.c_void_p * len(memory))(*(m.ctypes.data for m in memory))
            function(*map(ctypes.c_uint, (*grid, *block)), addresses)

        return run


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """`multibn.kernels.cupy` over the stand-in, with blocks of few threads."""
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray, cupy.RawModule = ndarray, RawModule
    cupy.empty = lambda shape, dtype: np.full(shape, -7, dtype).view(ndarray)
    cupy.empty_like = lambda a, dtype=None: np.full_like(a, -7, dtype).view(ndarray)
    cupy.asarray = lambda a: np.array(a).view(ndarray)
    cupy.__version__ = "stand-in"
    names = "multibn.kernels.cupy", "multibn.kernels.cupy_launch"
    assert not {"cupy", *names} & sys.modules.keys(), "CuPy is installed: test with that"
    sys.modules["cupy"] = cupy
    _arrays._namespaces[ndarray] = np
    try:
        from importlib import import_module

        file, launch = map(import_module, names)
        vars(launch)["THREADS"] = 64
        yield file
    finally:
        RawModule.launches.clear()
        del _arrays._namespaces[ndarray]
        for loaded in ("cupy", *names):
            sys.modules.pop(loaded, None)
            vars(sys.modules["multibn.kernels"]).pop(loaded.rpartition(".")[2], None)
