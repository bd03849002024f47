"""The compiled passes of host memory: any number of threads, processes that fork, compilation."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.launch import ROOT

require.need("numba")

from multibn.kernels import host  # noqa: E402
from tests.unit.test_kernels_host import check, data, passes, per_channel  # noqa: E402


class Threads:
    """Threads as OMP_NUM_THREADS or torch set them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._torch = sys.modules.get("torch")
        self._before = self._torch.get_num_threads() if self._torch else 0

    def set(self, n: int) -> None:
        self._monkeypatch.setenv("OMP_NUM_THREADS", str(n))
        if self._torch:
            self._torch.set_num_threads(n)

    def restore(self) -> None:
        if self._torch:
            self._torch.set_num_threads(self._before)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    setting = Threads(monkeypatch)
    yield setting
    setting.restore()


@pytest.mark.parametrize("shape", [(6, 64, 64, 64), (96, 2048, 3, 3), (45000, 40, 1, 1)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    shape: tuple[int, ...], threads: Threads
) -> None:
    x, dy = data(shape), data(shape, seed=1)
    c = per_channel(shape[1])
    found = []
    for n in (1, 2, 3):
        threads.set(n)
        assert host._num_threads() == n
        found.append(passes(host, dy, x, c, (0, 2, 3)))
    found.append(check(dy, x))
    for one, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(6, 64, 64, 64), (4, 5, 6, 7)], ids=str)
def test_several_threads_may_call_at_once(shape: tuple[int, ...], threads: Threads) -> None:
    """Ranks that are threads, and autograd's; each has its own data."""
    threads.set(2)
    c = per_channel(shape[1])
    inputs = [(data(shape, seed=i), data(shape, seed=i + 9)) for i in range(4)]

    def run(i: int) -> list[Any]:
        x, dy = inputs[i % len(inputs)]
        return passes(host, dy, x, c, (0, 2, 3))

    right = [run(i) for i in range(len(inputs))]
    with ThreadPoolExecutor(len(inputs)) as pool:
        for i, found in enumerate(pool.map(run, range(3 * len(inputs)))):
            for got, expected in zip(found, right[i % len(inputs)], strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_threads_after_a_fork() -> None:
    code = """
import multiprocessing, numpy as np
from multibn.kernels import local_moments
x = np.ones((6, 64, 64, 64), "float32")  # enough for two threads
def work(_):
    return float(local_moments(x, axis=(0, 2, 3))[0][0])
assert work(0) == 1
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map_async(work, [0]).get(60))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, "[1.0]"), ran.stderr


@pytest.mark.parametrize(
    "environment, used",
    [
        # numba looks for a directory in one place only, and finds none.
        (
            {
                "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
                "NUMBA_CACHE_DIR": os.devnull,
            },
            True,
        ),
        ({"NUMBA_DISABLE_JIT": "1"}, False),
    ],
    ids=["no cache", "no compiler"],
)
def test_numba_is_imported_at_first_use(environment: dict[str, str], used: bool) -> None:
    code = """
import sys, numpy as np
from multibn import kernels
assert "numba" not in sys.modules
mean, _ = kernels.local_moments(np.ones((2, 3, 4, 4), "float32"), axis=(0, 2, 3))
print(mean, "multibn.kernels.host" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip()) == (0, f"[1. 1. 1.] {used}"), ran.stderr
