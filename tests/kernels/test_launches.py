"""Launches of kernels on a GPU: what Triton looks at, what the core runs, which layouts fit."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multibn.kernels.layout import sizes_in_memory
from tests.helpers import require
from tests.helpers.launch import captured


def test_triton_looks_at_the_arguments_of_a_first_launch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is compiled for a GPU, and launched by a launcher that does nothing."""
    require.need("torch", "triton")
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from multibn.kernels import NormArgs, cuda
    from multibn.kernels.triton import launch, steps

    launches: list[tuple[Any, ...]] = []
    looks: list[int] = []
    on: list[str] = []
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17, "warpSize": 32},
        load_binary=lambda *binary: (None, "a function", 0, 0, 1024),
    )
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 77,
        launcher_cls=lambda source, metadata: lambda *launch: launches.append(launch),
        utils=utils,
    )
    kernel = steps.coefficients_of
    look = kernel.run

    @contextlib.contextmanager
    def second(x: Any) -> Iterator[None]:
        on.append(f"GPU {x.get_device()}")
        current.append(x.get_device())
        yield
        current.pop()

    def looked_at(*arguments: Any, **options: Any) -> Any:
        looks.append(len(arguments))
        return look(*arguments, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(cuda, "_known", {})
    current = [-1]  # of host memory
    monkeypatch.setattr(launch, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device_of", second)
    monkeypatch.setattr(kernel, "run", looked_at)
    statistics, weight = torch.rand(1402, dtype=torch.float64), torch.rand(700)

    class OnSecond(torch.Tensor):
        def get_device(self) -> int:
            return 1

    def launched(bias: Any, looked: int, statistics: Any = statistics) -> tuple[Any, ...]:
        launches.clear()
        looks.clear()
        args = NormArgs(None, weight, bias, 1e-5, (0,))
        cuda.coefficients_of(statistics, args, torch.float32)
        assert len(looks) == looked
        *grid, stream, function, packed, _, _, _ = launches[0][:9]
        assert (grid, stream, function) == ([3, 1, 1], 77, "a function")
        given = dict(zip(kernel.arg_names, launches[0][9:], strict=True))
        assert given.pop("coefficients").shape == (5, 700)
        inputs = [id(given.pop(name)) for name in ("statistics", "weight", "bias")]
        return inputs, given, packed

    assert launched(weight, 1) == launched(weight, 0) == launched(weight, 0)
    assert launched(None, 1) == launched(None, 0)
    assert launched(weight.half(), 1)[1:] == launched(weight.half(), 0)[1:]
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    launched(weight, 1)  # a profiler's hook
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [])
    for looked in (1, 0):  # another GPU than the current one
        launched(None, looked, statistics.as_subclass(OnSecond))
    assert on == ["GPU 1"] * 2


_DRIVER = """
#include <stdint.h>
uint64_t seen[64];
int calls, answer;
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b,
                   unsigned c, unsigned shared, void *stream, void **parameters, void **options)
{
    const uint64_t first[] = {(uintptr_t)function, x, y, z, threads, b, c, shared,
                              (uintptr_t)stream, options != 0};
    for (int i = 0; i < 10; i++)
        seen[i] = first[i];
    for (int i = 0; i < 4; i++)
        seen[10 + i] = *(uint64_t *)parameters[i];
    calls++;
    return answer;
}
"""
_LAUNCHES = """
import ctypes, sys
from multibn.kernels.core._core import run_launches
from multibn.kernels.triton.prepared import pack

driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
seen, calls, answer = ((ctypes.c_uint64 * 64).in_dll(driver, "seen"),
                      ctypes.c_int.in_dll(driver, "calls"), ctypes.c_int.in_dll(driver, "answer"))
only_first = pack(2**40, 3, 128, 64, [(1, 0), (-1, -(2**63)), (0, 0), (2, 0)])
launches = only_first + pack(2**41, 5, 32, 0, [(-1, 1), (-1, 2), (-1, 3), (-1, 4)])
run_launches(only_first, 77, 2**63, 11, None)
assert list(seen[:14]) == [2**40, 3, 1, 1, 128, 1, 1, 64, 77, 0, 11, 2**63, 2**63, 0], list(seen)
run_launches(launches, 78, 1, 2, 3)
assert (calls.value, list(seen[8:14])) == (3, [78, 0, 1, 2, 3, 4])
answer.value = 700
for wrong in (lambda: run_launches(only_first, 77), lambda: run_launches(),
              lambda: run_launches(3, 4),
              lambda: pack(1, 1, 1, 1, [(0, 0)] * 41)):
    try:
        wrong()
    except Exception as raised:
        print(type(raised).__name__, raised)
"""


def test_the_core_runs_prepared_launches(tmp_path: Path) -> None:
    """A driver that records takes the place of CUDA's."""
    require.need("core", "torch", "triton")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(_DRIVER)
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(library), str(source)], check=True)
    ran = captured(sys.executable, "-c", _LAUNCHES, str(library))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "RuntimeError cuLaunchKernel failed with CUDA's error 700",
        "TypeError launches and a stream are missing",
        "TypeError expected bytes, int found",
        "error pack expected 86 items for packing (got 88)",
    ]


@pytest.mark.parametrize(
    "shape, strides, axis, sizes",
    [
        pytest.param((2, 3, 4, 5), (60, 20, 5, 1), (0, 2, 3), (2, 3, 20), id="contiguous"),
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3), (40, 3, 1), id="channels last"),
        pytest.param((2, 3, 4, 5), (60, 20, 1, 4), (0, 2, 3), (2, 3, 20), id="columns first"),
        pytest.param((4, 3, 5), (15, 5, 1), (0,), (4, 15, 1), id="two channel axes"),
        pytest.param((4, 3, 5), (15, 1, 3), (0,), None, id="channel axes not in order"),
        pytest.param((3, 4, 5), (20, 5, 1), (1,), None, id="a reduced axis between channels"),
        pytest.param((4, 3, 5), (30, 10, 2), (0, 2), None, id="gaps"),
        pytest.param((1, 3, 1), (7, 1, 9), (0, 2), (1, 3, 1), id="axes of one element"),
    ],
)
def test_an_activation_has_three_sizes_in_memory_or_is_copied(
    shape: Any, strides: Any, axis: Any, sizes: Any
) -> None:
    assert sizes_in_memory(shape, strides, axis) == sizes
