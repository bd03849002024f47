"""Sums over ChainerMN's pure_nccl communicator, with a stand-in of CuPy."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multibn.communicators.transports.chainermn import ChainerMN, sum_by_nccl
from tests.communicators.transports import standin_cupy
from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks


@pytest.fixture
def cupy() -> Iterator[Any]:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("the stand-in is for machines without CuPy")
    with standin_cupy.installed() as module:
        yield module


def _comm(world: ThreadCommunicator) -> standin_cupy.NcclCommunicator:
    def exchange(a: Any) -> Any:
        return world.allreduce(a.copy())

    return standin_cupy.NcclCommunicator(world.size, b"", world.rank, exchange)


def test_arrays_of_cupy_are_summed_in_the_current_stream(cupy: Any) -> None:
    def work(world: ThreadCommunicator) -> None:
        comm = _comm(world)
        for dtype in ("float16", "float32", "float64", "int32", "int64"):
            for shape in ((6,), (2, 3), ()):
                a = np.full(shape, 1 + world.rank, dtype)
                x = cupy.asarray(a)
                summed = sum_by_nccl(comm, x)
                assert (summed.dtype, summed.shape) == (dtype, shape)
                np.testing.assert_array_equal(summed.get(), np.full(shape, 3, dtype))
                np.testing.assert_array_equal(x.get(), a)
        assert set(comm.streams) == {standin_cupy.STREAM}

    run_ranks(2, work)


def test_tensors_of_torch_are_summed_as_arrays_of_cupy(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require.need("torch")
    import torch

    monkeypatch.setattr(torch, "from_dlpack", lambda a: torch.from_numpy(a.get()))

    def work(world: ThreadCommunicator) -> None:
        x = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
        summed = sum_by_nccl(_comm(world), x)
        assert torch.equal(summed, 2 * x.detach())
        assert not summed.requires_grad

    run_ranks(2, work)


def test_the_communicator_of_chainermn_sums_what_is_on_a_gpu(cupy: Any) -> None:
    made = []

    class PureNcclCommunicator:
        nccl_comm = standin_cupy.NcclCommunicator(1, b"", 0)

        def _init_comms(self) -> None:
            made.append(True)

    communicator = ChainerMN.__new__(ChainerMN)
    communicator.comm = PureNcclCommunicator()
    communicator.communication_backend = "nccl"
    x = cupy.asarray(np.arange(3.0))
    assert communicator.takes(x)
    assert not communicator.takes(np.ones(3))
    np.testing.assert_array_equal(communicator.allreduce(x).get(), np.arange(3.0))
    assert made == [True]
    communicator.communication_backend = "mpi"
    assert not communicator.takes(x)


def test_the_gpu_is_that_of_the_array(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may compute on its second GPU without making that GPU the current one."""
    current, used = ["the first GPU"], []

    @contextlib.contextmanager
    def second(x: Any) -> Iterator[None]:
        current.append("the second GPU")
        yield
        current.pop()

    def sum_nothing(self: Any, *arguments: Any) -> None:
        used.append(current[-1])

    monkeypatch.setattr(standin_cupy.NcclCommunicator, "allReduce", sum_nothing)
    monkeypatch.setattr(standin_cupy.ndarray, "device", property(second))
    sum_by_nccl(standin_cupy.NcclCommunicator(1, b"", 0), cupy.asarray(np.ones(3)))
    assert used == ["the second GPU"]


def test_dtypes_that_nccl_does_not_sum_are_refused(cupy: Any) -> None:
    comm = standin_cupy.NcclCommunicator(1, b"", 0)
    with pytest.raises(TypeError, match=r"of dtype float16, .* or int64: got complex64. Convert"):
        sum_by_nccl(comm, cupy.asarray(np.ones(1, np.complex64)))
