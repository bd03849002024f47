"""The compiled passes of host memory: any number of threads, processes that fork, processors."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from multibn.kernels import cpu
from multibn.kernels.core import _core
from tests.helpers import launch
from tests.kernels.passes import NARROW, as_torch, check, data, layer, passes, statistics, threads
from tests.kernels.test_passes import mask_of

NEEDS = "core"


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, v in expected.items():
        np.testing.assert_array_equal(found[name], v, err_msg=name)


@pytest.mark.parametrize(
    "asked, cores, n",
    [("3", 7, 3), ("5,2", 7, 5), ("0", 7, 1), ("", 7, 7), ("many", 7, 7), ("", None, 1)],
)
def test_without_torch_the_environment_says_how_many(
    asked: str, cores: int | None, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert cpu.num_threads() == n


# The first is large enough to leave past the caches, and a thread's third of it is not.
@pytest.mark.parametrize(
    "shape", [(9, 64, 64, 64), (96, 2048, 3, 3), (45000, 40, 1, 1), (2, 70, 100, 90)], ids=str
)
@pytest.mark.parametrize("mask", [None, "random"])
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...], mask: Any) -> None:
    i, dy = layer(shape, relu=mask is not None, mask=mask_of(mask, shape))
    i.x[:1] += 1e4 if mask else 0  # the first centre is far from the mean
    found = []
    for n in (1, 2, 3):
        with threads(n):
            assert cpu.num_threads() == n
            found.append(passes(cpu, i, dy))
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("shape", [(6, 64, 64, 64), (4, 5, 6, 7)], ids=str)
def test_several_threads_may_call_at_once(shape: tuple[int, ...]) -> None:
    """Ranks that are threads, and autograd's; each has its own data."""
    inputs = [layer(shape) for _ in range(4)]
    inputs = [(i._replace(x=data(shape, seed=n)), dy) for n, (i, dy) in enumerate(inputs)]

    def run(n: int) -> Any:
        return passes(cpu, *inputs[n % len(inputs)])

    right = [run(n) for n in range(len(inputs))]
    with threads(2), ThreadPoolExecutor(len(inputs)) as pool:
        for n, found in enumerate(pool.map(run, range(2 * len(inputs)))):
            assert_same_bits(found, right[n % len(inputs)])


def test_the_core_computes_in_a_process_without_torch() -> None:
    code = """
import sys, numpy as np
from multibn.kernels import NormArgs, reference, cpu
reference.begin_forward = None
x = np.ones((3, 2))
print(cpu.begin_forward(NormArgs(x, None, None, 0.0, (0,)), 1.0, 3.0)[0], "torch" in sys.modules)
"""
    assert launch.printed("-c", code) == "1.0 False\n"


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


def levels() -> Iterator[None]:
    """The instructions of each processor."""
    try:
        for level in range(len(_core.levels)):
            _core.use_level(level)
            yield
    finally:
        _core.use_level(len(_core.levels) - 1)


@pytest.mark.parametrize("shape", [(3, 20, 64, 64), (37, 3, 2, 2), (19, 2100, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("mask", [None, "random"])
def test_all_instructions_give_the_same_numbers(
    shape: tuple[int, ...], dtype: str, mask: Any
) -> None:
    """Only the order of sums may differ."""
    i, dy = layer(shape, dtype, relu=True, residual=True, mask=mask_of(mask, shape))
    about = statistics(i), np.linspace(-1, 1, 2 * shape[1])
    found = [(check(cpu, i, dy), passes(cpu, i, dy, *about)) for _ in levels()]
    with pytest.raises(ValueError, match=f"`level` must be below {len(_core.levels)}"):
        _core.use_level(len(_core.levels))
    for _, other in found[1:]:
        for name in NARROW:
            np.testing.assert_array_equal(other[name], found[0][1][name])


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
    i, dy = layer(shape, dtype, as_torch, relu=True, residual=True)
    import torch

    order = {"memory_format": getattr(torch, layout)}
    batch, sums = statistics(i), torch.linspace(-1, 1, 2 * shape[1]).double()

    def results(samples: Any, of: Any) -> list[Any]:
        x, dy_, residual = (of(a.to(**order)[samples]) for a in (i.x, dy, i.residual))
        there = i._replace(x=x, weight=of(i.weight), bias=of(i.bias), residual=residual)
        found = passes(cpu, there, dy_, type(batch)(*map(of, batch)), of(sums))
        return [np.asarray(found[name]) for name in NARROW]

    parts = [results(slice(n, n + 1), as_torch) for n in range(shape[0])]
    right = [np.concatenate(samples) for samples in zip(*parts, strict=True)]
    for _ in levels():
        for of in (lambda a: a, lambda a: a.numpy()):
            for got, expected in zip(results(slice(None), of), right, strict=True):
                np.testing.assert_array_equal(got, expected)
