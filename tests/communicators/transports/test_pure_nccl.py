"""Sums over ChainerMN's pure_nccl communicator, with a stand-in of CuPy."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multibn.communicators.transports.chainermn import ChainerMN, sum_by_nccl
from tests.communicators.transports import standin_cupy
from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks


class NcclCommunicator:
    """CuPy's, whose pointers are arrays here; alone, it sums over one rank."""

    def __init__(self, world: ThreadCommunicator | None = None) -> None:
        self._world = world

    def allReduce(  # noqa: N802 (CuPy's name)
        self, sent: Any, received: Any, n: int, kind: str, operation: str, stream: int
    ) -> None:
        assert (n, kind) == (sent.size, sent.dtype)
        assert (operation, stream) == ("sum", standin_cupy.STREAM)
        received[...] = self._world.allreduce(sent.copy()) if self._world else sent


@pytest.fixture
def cupy() -> Iterator[Any]:
    require.need("a machine without CuPy")
    with standin_cupy.installed() as module:
        yield module


def test_arrays_are_summed_in_the_current_stream(cupy: Any) -> None:
    def work(world: ThreadCommunicator) -> None:
        comm = NcclCommunicator(world)
        for dtype in ("float16", "float32", "float64", "int32", "int64"):
            for shape in ((6,), (2, 3), ()):
                a = np.full(shape, 1 + world.rank, dtype)
                x = cupy.asarray(a)
                summed = sum_by_nccl(comm, x)
                assert (summed.dtype, summed.shape) == (dtype, shape)
                np.testing.assert_array_equal(summed.get(), np.full(shape, 3, dtype))
                np.testing.assert_array_equal(x.get(), a)

    run_ranks(2, work)


def test_the_communicator_of_chainermn_sums_what_is_on_a_gpu(cupy: Any) -> None:
    made = []

    class PureNcclCommunicator:
        nccl_comm = NcclCommunicator()

        def _init_comms(self) -> None:
            made.append(True)

    communicator = ChainerMN.__new__(ChainerMN)
    communicator.comm = PureNcclCommunicator()
    communicator.communication_backend = "nccl"
    x = cupy.asarray(np.arange(3.0))
    assert communicator.reduces_on_device(x)
    assert not communicator.reduces_on_device(np.ones(3))
    np.testing.assert_array_equal(communicator.allreduce(x).get(), np.arange(3.0))
    assert made == [True]
    communicator.communication_backend = "mpi"
    assert not communicator.reduces_on_device(x)


def test_the_gpu_is_that_of_the_array(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may compute on its second GPU without making that GPU the current one."""
    current, used = ["the first GPU"], []

    @contextlib.contextmanager
    def second(x: Any) -> Iterator[None]:
        current.append("the second GPU")
        yield
        current.pop()

    monkeypatch.setattr(NcclCommunicator, "allReduce", lambda *_: used.append(current[-1]))
    monkeypatch.setattr(standin_cupy.ndarray, "device", property(second))
    sum_by_nccl(NcclCommunicator(), cupy.asarray(np.ones(3)))
    assert used == ["the second GPU"]
