"""What of NCCL's communicator can be told without a GPU."""

import contextlib
import importlib.util
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess, as_communicator
from multibn.communicators.transports import nccl
from multibn.communicators.transports.nccl import NCCL
from tests.helpers import require, standin_cupy
from tests.helpers.ranks import ThreadCommunicator, run_ranks

needs_no_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="CuPy is installed"
)


def loaded() -> Any:
    """A handle as it comes out of a file: made without CuPy."""
    function, arguments = nccl._restore, (SingleProcess(),)
    return function(*arguments)


@pytest.fixture(params=[13, 14])
def cupy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A stand-in of either version."""
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("the stand-in is for machines without CuPy")
    with standin_cupy.installed(request.param) as module:
        yield module


@needs_no_cupy
def test_without_cupy_it_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"NCCL needs CuPy: not found.*pip install 'multibn\[cup"):
        NCCL(SingleProcess())
    handle = loaded()
    with pytest.raises(ImportError, match="NCCL needs CuPy"):
        handle.comm  # noqa: B018


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"`unique_id` must be of 128 numbers: got \(1, 2"):
        NCCL(SingleProcess(), unique_id=(1, 2, 3))
    with pytest.raises(TypeError, match="a communicator must be None"):
        NCCL("gloo")


def test_handles_can_be_loaded_without_cupy() -> None:
    handle = loaded()
    assert as_communicator(handle) is handle
    found = pickle.loads(pickle.dumps(handle))
    assert isinstance(found, NCCL)
    assert (found.rank, found.size) == (0, 1)
    assert repr(found) == "NCCL(SingleProcess())"


def test_host_arrays_are_not_on_a_gpu() -> None:
    assert not nccl.is_on_gpu(np.ones(3))


@pytest.mark.parametrize("handed", [False, True])
def test_the_unique_id_of_either_cupy_is_taken(cupy: Any, handed: bool) -> None:
    """CuPy 13 gives and takes a tuple of signed numbers, CuPy 14 bytes; neither takes the other."""
    unique_id = cupy.cuda.nccl.get_unique_id()

    def work(world: ThreadCommunicator) -> None:
        standin_cupy.NcclCommunicator.meet[world.rank] = lambda a: world.allreduce(a.copy())
        communicator = NCCL(world, unique_id=unique_id if handed else None)
        assert communicator.comm.unique_id == unique_id
        summed = communicator.allreduce(cupy.asarray([1.0, world.rank]))
        np.testing.assert_array_equal(summed.get(), [2.0, 1.0])
        np.testing.assert_array_equal(communicator.allreduce_in_place(summed).get(), [4.0, 2.0])
        assert communicator.comm.streams == [standin_cupy.STREAM] * 2

    run_ranks(2, work)


def test_an_id_that_crossed_the_ranks_as_a_list_is_taken(cupy: Any) -> None:
    unique_id = cupy.cuda.nccl.get_unique_id()
    communicator = NCCL(SingleProcess(), unique_id=list(unique_id))
    assert communicator.comm.unique_id == unique_id


def test_torch_tensors_are_summed_in_the_stream_that_a_cuda_graph_of_torch_captures(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require.need("torch")
    import torch

    stream = SimpleNamespace(cuda_stream=77)  # not CuPy's
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)

    def work(world: ThreadCommunicator) -> None:
        standin_cupy.NcclCommunicator.meet[world.rank] = lambda a: world.allreduce(a.copy())
        communicator = NCCL(world)
        for dtype in dtypes:
            x = torch.arange(6).reshape(2, 3).T.to(dtype) + world.rank  # not contiguous
            before = x.clone()
            summed = communicator.allreduce_on_device(x)
            assert (summed.dtype, summed.shape) == (dtype, x.shape)
            assert torch.equal(summed, 2 * torch.arange(6).reshape(2, 3).T.to(dtype) + 1)
            assert torch.equal(x, before)
        number = torch.ones((), dtype=torch.float64, requires_grad=True)
        summed = communicator.allreduce_on_device(number)
        assert (summed.shape, summed.item(), summed.requires_grad) == ((), 2.0, False)
        x = torch.arange(6.0) + world.rank
        summed = communicator.allreduce_in_place(x)
        assert summed.data_ptr() == x.data_ptr()
        assert torch.equal(x, 2 * torch.arange(6.0) + 1)
        assert communicator.comm.streams == [77] * (len(dtypes) + 2)

    run_ranks(2, work)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_gpu_is_that_of_the_first_array(
    library: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may compute on its second GPU without making that GPU the current one."""
    current = ["the first GPU"]
    made_on = []

    @contextlib.contextmanager
    def second(*x: Any) -> Iterator[None]:
        current.append("the second GPU")
        yield
        current.pop()

    make = standin_cupy.NcclCommunicator.__init__

    def recorded(self: Any, *arguments: Any) -> None:
        made_on.append(current[-1])
        make(self, *arguments)

    monkeypatch.setattr(standin_cupy.NcclCommunicator, "__init__", recorded)
    monkeypatch.setattr(standin_cupy.ndarray, "device", property(second))
    x = cupy.asarray(np.ones(3))
    if library == "torch":
        require.need("torch")
        import torch

        monkeypatch.setattr(torch.cuda, "device_of", second)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=7))
        x = torch.ones(3)
    communicator = NCCL(SingleProcess())
    for _ in range(2):
        communicator.allreduce_on_device(x)
        communicator.allreduce_in_place(x)
    assert set(made_on) == {"the second GPU"}


def test_dtypes_that_nccl_does_not_sum_are_refused(cupy: Any) -> None:
    require.need("torch")
    import torch

    comm = NCCL(SingleProcess()).comm
    for x in (torch.ones(1, dtype=torch.complex64), cupy.asarray(np.ones(1, np.complex64))):
        with pytest.raises(TypeError, match=r"of dtype float16, .* or bfloat16: got complex64"):
            nccl.allreduce(comm, x)
