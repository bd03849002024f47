"""The compiled passes of host memory: any number of threads, processes that fork, processors."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.helpers import launch, require

require.need("core")

from multibn.kernels.core import _core  # noqa: E402
from multibn.kernels.core.memory import num_threads  # noqa: E402
from tests.kernels.passes import threads  # noqa: E402
from tests.kernels.test_host import check, data, host, passes, per_channel  # noqa: E402


@pytest.mark.parametrize("shape", [(6, 64, 64, 64), (96, 2048, 3, 3), (45000, 40, 1, 1)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...]) -> None:
    x, dy = data(shape), data(shape, seed=1)
    c = per_channel(shape[1])
    found = []
    for n in (1, 2, 3):
        with threads(n):
            assert num_threads() == n
            found.append(passes(host, dy, x, c, (0, 2, 3)))
    found.append(check(dy, x))
    for one, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(6, 64, 64, 64), (4, 5, 6, 7)], ids=str)
def test_several_threads_may_call_at_once(shape: tuple[int, ...]) -> None:
    """Ranks that are threads, and autograd's; each has its own data."""
    c = per_channel(shape[1])
    inputs = [(data(shape, seed=i), data(shape, seed=i + 9)) for i in range(4)]

    def run(i: int) -> list[Any]:
        x, dy = inputs[i % len(inputs)]
        return passes(host, dy, x, c, (0, 2, 3))

    right = [run(i) for i in range(len(inputs))]
    with threads(2), ThreadPoolExecutor(len(inputs)) as pool:
        for i, found in enumerate(pool.map(run, range(3 * len(inputs)))):
            for got, expected in zip(found, right[i % len(inputs)], strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_threads_work_after_a_fork() -> None:
    code = """
import multiprocessing, numpy as np
from multibn.engine import local_moments
x = np.ones((6, 64, 64, 64), "float32")  # enough for two threads
def work(_):
    return float(local_moments(x, axis=(0, 2, 3)).mean[0])
assert work(0) == 1
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map_async(work, [0]).get(60))
"""
    assert launch.printed("-c", code, OMP_NUM_THREADS="2") == "[1.0]\n"


def test_no_thread_is_started_when_the_program_ends() -> None:
    code = """
import threading, numpy as np
from multibn.engine import local_moments
x = np.ones((6, 64, 64, 64), "float32")  # enough for two threads
def work():
    threading.main_thread().join()
    print(local_moments(x, axis=(0, 2, 3)).mean[0])
local_moments(x, axis=(0, 2, 3))
threading.Thread(target=work).start()
"""
    assert launch.printed("-c", code, OMP_NUM_THREADS="2") == "1.0\n"


@pytest.mark.parametrize("available", [True, False], ids=["C core", "no C core"])
def test_without_the_core_the_generic_kernels_are_used(available: bool) -> None:
    code = f"""
import sys, numpy as np
from multibn import info
from multibn.engine import local_moments
if not {available}:
    sys.modules["multibn.kernels.core._core"] = None  # as if missing
info.ask = lambda code: None  # other processes, which import the frameworks
mean = local_moments(np.ones((2, 3, 4, 4), "float32")).mean
print(mean, "multibn.kernels.host" in sys.modules, info.text(info.collect()))
"""
    printed = launch.printed("-W", "error", "-c", code)
    assert printed.startswith(f"[1. 1. 1.] {available} ")
    (line,) = (line for line in printed.splitlines() if line.startswith("  host"))
    if available:
        assert "C core, " in line
    else:
        assert "generic (slow): the C core is missing" in line
        assert "Install a C compiler (gcc or clang)" in line


@pytest.mark.parametrize("shape", [(3, 20, 64, 64), (37, 3, 2, 2), (19, 2100, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_all_instructions_give_the_same_numbers(shape: tuple[int, ...], dtype: str) -> None:
    """Those of each processor: only the order of sums may differ."""
    x, dy = data(shape, dtype), data(shape, dtype, 1)
    found = []
    try:
        for level in range(len(_core.levels)):
            _core.use_level(level)
            found.append(check(dy, x))
    finally:
        _core.use_level(len(_core.levels) - 1)
    with pytest.raises(ValueError, match=f"`level` must be below {len(_core.levels)}"):
        _core.use_level(len(_core.levels))
    for one, *others in zip(*found, strict=True):
        for other in others:
            if one.shape == shape:  # y and dx
                np.testing.assert_array_equal(one, other)
            np.testing.assert_allclose(one, other, rtol=1e-5 if dtype != "float64" else 1e-12)


@pytest.mark.parametrize(
    "shape, layout",
    [
        ((9, 64, 64, 64), "contiguous_format"),
        ((9, 64, 64, 64), "channels_last"),
        ((5, 208, 23, 23), "contiguous_format"),
        ((9, 70, 51, 50), "contiguous_format"),
        ((9, 21, 61, 60), "channels_last"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_result_is_that_of_its_samples(
    shape: tuple[int, ...], layout: str, dtype: str
) -> None:
    """A result of 2 MB leaves past the caches, in whole cache lines.

    torch's memory begins with one, NumPy's does not.
    """
    require.need("torch")
    import torch

    arrays = [torch.from_numpy(data(shape, dtype, seed=n)) for n in range(3)]
    x, dy, residual = (a.to(memory_format=getattr(torch, layout)) for a in arrays)
    statistics = [torch.from_numpy(v) for v in per_channel(shape[1])]
    summed = torch.cat(statistics[4:])

    def results(samples: Any, like: Any) -> list[Any]:
        on: Any = {"eps": 0.25, "axis": (0, 2, 3), "relu": True}
        x_, dy_, residual_ = (like(a[samples]) for a in (x, dy, residual))
        about = [like(v) for v in statistics[:4]]
        y = host.normalize(x_, *about, **on, residual=residual_)
        gradients = host.finish_backward(like(summed), dy_, x_, *about, 0.3, **on, y=y)
        return [np.asarray(a) for a in (y, *gradients)]

    parts = [results(slice(n, n + 1), lambda a: a) for n in range(shape[0])]
    right = [np.concatenate(samples) for samples in zip(*parts, strict=True)]
    try:
        for level in range(len(_core.levels)):
            _core.use_level(level)
            for like in (lambda a: a, lambda a: a.numpy()):
                for got, expected in zip(results(slice(None), like), right, strict=True):
                    np.testing.assert_array_equal(got, expected)
    finally:
        _core.use_level(len(_core.levels) - 1)
