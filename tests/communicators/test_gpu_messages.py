"""Messages and sums of a GPU, which stand-ins of CuPy and torch have in host memory."""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from multibn import SingleProcess, wire
from multibn.communicators.deferred_checks import begin_copy, is_captured, on_stream
from multibn.communicators.layer_communicator import reject_input
from multibn.communicators.transports.chainermn import ChainerMN, sum_by_nccl
from multibn.communicators.transports.torch_distributed import _Transport
from multibn.engine.consistency import check_equal
from tests.communicators.phases import Phase, errors_of
from tests.communicators.transports import standin_cupy
from tests.helpers import require
from tests.helpers.ranks import EqualRanks, ThreadCommunicator, run_ranks

NEEDS = "torch"

C = 3
LENGTH = 2 * C + 2  # of a layer's numbers
TOGETHER = 4  # messages at which the host looks together, while as many others are sent


@pytest.fixture
def cupy() -> Iterator[Any]:
    require.need("a machine without CuPy")
    with standin_cupy.installed() as module:
        yield module


@pytest.fixture(params=["numpy", "cupy"])
def ones(request: pytest.FixtureRequest) -> Any:
    """Makes arrays of ones, in host memory or on a GPU."""
    if request.param == "numpy":
        return np.ones
    cupy = request.getfixturevalue("cupy")
    return lambda n: cupy.asarray(np.ones(n))


on_a_gpu = pytest.mark.parametrize("ones", ["cupy"], indirect=True)


@pytest.mark.parametrize("size", [2, 3])
def test_unlike_layers_are_named_on_all_ranks_at_the_first_message(ones: Any, size: int) -> None:
    def work(world: ThreadCommunicator) -> None:
        name = "layer1.bn2" if world.rank == 1 else "layer1.bn1"
        Phase(world, name).allreduce(ones(LENGTH))

    for error in errors_of(size, work):
        assert isinstance(error, RuntimeError)
        assert "the ranks are in different places: rank(s) [0" in str(error)
        assert "rank(s) [1] in layer1.bn2. All ranks must run the same layers" in str(error)


def test_unlike_channels_are_named_before_messages_of_unlike_sizes(ones: Any) -> None:
    def work(world: ThreadCommunicator) -> None:
        Phase(world, "0").allreduce(ones(2 * (C + world.rank) + 2))

    for error in errors_of(2, work):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "the ranks have built layer 0 differently: rank(s) [0] with 3 channels; rank(s) [1] "
            "with 4 channels. Build the same model on all ranks."
        )


@pytest.mark.parametrize("widths", [(LENGTH, LENGTH), (LENGTH, 2 * LENGTH)])
def test_unlike_layers_are_named_later(ones: Any, widths: tuple[int, int]) -> None:
    """A GPU's are named some messages later: by then a message has long arrived in host memory.

    Layers of unlike widths would meet in the transport: a hang, or an error of its own.
    """

    def work(world: ThreadCommunicator) -> None:
        layers = [(Phase(world, f"bn{k}"), n) for k, n in enumerate(widths, 1)]
        for layer, n in layers:
            summed = layer.allreduce(ones(n))
            host = summed.get() if hasattr(summed, "get") else summed
            np.testing.assert_array_equal(host, [2.0] * n)
        for layer, n in reversed(layers) if world.rank == 1 else layers:
            layer.allreduce(ones(n))
        for layer, n in layers * TOGETHER:
            layer.allreduce(ones(n))
            sent[world.rank] += 1

    sent = [0, 0]
    for rank, error in enumerate(errors_of(2, work)):
        assert isinstance(error, RuntimeError)
        if isinstance(ones(1), np.ndarray):
            expected = (
                "the ranks are in different places: rank(s) [0] in bn1 (forward, float32, call 2); "
                "rank(s) [1] in bn2 (forward, float32, call 2). All ranks must run"
            )
        else:
            expected = (
                f"the ranks were in different places in an earlier call, {('bn1', 'bn2')[rank]} "
                f"(forward, float32, call 2), on rank {rank}: another rank ran a different layer"
            )
            assert sent == [2 * TOGETHER - 4] * 2, "all ranks look at a message at the same moment"
        assert str(error).startswith(expected)


# What rank 1 adds to a message, or None where the rank refuses its input; and what all ranks say.
SPOILED: dict[str, tuple[float | None, str]] = {
    "infinity": (
        np.inf,
        r"FloatingPoint.* of an earlier call, bn \(forward, float32, call 1\), are not finite:",
    ),
    "a mark": (
        wire.rank_bit(1),
        r"FloatingPoint.* NaN, infinity or values that overflow on rank\(s\) \[1\] of 2\. Check",
    ),
    "a refusal": (
        None,
        r"RuntimeError: rank {rank} stops in an earlier call, bn \(forward, .*, call 1\): the "
        r"input was rejected on rank\(s\) \[1\] of 2\. See the error on that rank\.$",
    ),
}


@on_a_gpu
@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("copied", [(False, False), (True, True), (False, True), (True, False)])
def test_a_spoiled_message_on_a_gpu_is_an_error_some_messages_later(
    ones: Any, copied: tuple[bool, bool], kind: str
) -> None:
    """Eager layers and compiled ones behave alike, also where one follows the other."""
    spoiled, expected = SPOILED[kind]

    def work(world: ThreadCommunicator) -> None:
        layer, other = (Phase(world, "bn", copied=each) for each in copied)
        if world.rank == 0:
            layer.allreduce(ones(LENGTH))
        elif spoiled is None:
            reject_input(layer.layer, None, C, ones(1))
        else:
            layer.allreduce(ones(LENGTH) + spoiled)
        for _ in range(2 * TOGETHER):
            other.allreduce(ones(LENGTH))

    for rank, error in enumerate(errors_of(2, work)):
        assert re.match(expected.format(rank=rank), f"{type(error).__name__}: {error}")


@on_a_gpu
def test_the_last_messages_of_a_run_are_looked_at_by_check_sync(ones: Any) -> None:
    equal = EqualRanks()
    layer = Phase(equal, "bn")
    compare: Any = partial(check_equal, {}, SingleProcess(), parameters=(), statistics=())
    layer.allreduce(ones(LENGTH) + np.inf)
    with pytest.raises(FloatingPointError, match=r"an earlier call, bn \(forward, .* call 1\)"):
        compare()
    compare()
    gone = Phase(equal, "gone")
    gone.allreduce(ones(LENGTH) + np.inf)
    reference = ref(gone)
    del gone
    gc.collect()
    assert reference() is None, "a message keeps no model alive"
    compare()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes tensors that say they are on a GPU, with stand-ins for torch's events and streams."""

    class OnGPU(torch.Tensor):
        is_cuda = True
        gpu = 0

        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda", self.gpu)

        def get_device(self) -> int:
            return self.gpu

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.gpu = device.index

        def record(self, stream: Any) -> None:
            assert stream == (None if self.gpu == 0 else f"the stream of GPU {self.gpu}")

        def synchronize(self) -> None:
            pass

    empty = torch.empty
    monkeypatch.setattr(torch, "Event", Event)
    # Not without a device: the default one, which may be a GPU, has no memory to pin.
    pinned = lambda *a, pin_memory, device, **options: empty(*a, **options)  # noqa: E731
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext())
    streams = "the stream of GPU {0.index}".format
    monkeypatch.setattr(torch.cuda, "current_stream", streams)

    def make(value: float, gpu: int = 0) -> Any:
        made: Any = torch.full((4,), value, dtype=torch.float64).as_subclass(OnGPU)
        made.gpu = gpu
        return made

    return make


def test_a_layer_may_move_to_another_gpu_and_train_after_inference(on_gpu: Any) -> None:
    """torch's event stays on the GPU on which it was recorded first.

    Torch refuses to write to a tensor that was made in inference mode.
    """
    unused: Any = {}
    for gpu, inference in ((0, True), (1, False), (0, False)):
        with torch.inference_mode(inference):
            wait: Any = begin_copy(on_gpu(3.0 + gpu, gpu), unused)
            assert wait().tolist() == [3.0 + gpu] * 4
    assert [len(each) for each in unused.values()] == [1, 1]


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_on_the_gpu_of_the_message_takes_no_copy(
    on_gpu: Any, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(gpu: int) -> Iterator[None]:
        current.append(gpu)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == captured)
    for gpu in (0, 1):
        assert is_captured(on_gpu(1.0, gpu)) == (gpu == captured)


def test_messages_of_another_stream_are_read_in_that_stream(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current stream need not wait for it."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def enter(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 70 + gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device.index))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    for stream in (71, 5):
        with on_stream(stream, on_gpu(1.0, 1)):
            pass
    assert entered == [(5, 1)]


def test_first_messages_are_summed_on_the_gpu_of_the_activation(
    on_gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's current GPU is the first of its machine where nobody calls set_device."""
    current = [0]

    @contextlib.contextmanager
    def device_of(x: Any) -> Iterator[None]:
        current.append(x.get_device())
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    group = SimpleNamespace(bound_device_id=None)
    nccl: Any = SimpleNamespace(_backends={"cuda": "nccl"}, _group=lambda: group)
    asked: list[Any] = []

    class Equal(EqualRanks):
        def allreduce_on_device(self, x: Any, /) -> Any:
            asked.append(_Transport._device(nccl))
            return x + x

    for send in (lambda phase: phase.allreduce(on_gpu(1.0, 3)),
                 lambda phase: phase.of(4, on_gpu(1.0, 3))):  # fmt: skip
        asked.clear()
        send(Phase(Equal(), "bn"))
        assert asked[0] == torch.device("cuda", 3)
    group.bound_device_id = torch.device("cuda", 5)
    assert _Transport._device(nccl) == torch.device("cuda", 5)


def test_calls_in_a_row_wait_for_none_of_their_copies(on_gpu: Callable[..., Any]) -> None:
    unused: Any = {}
    waits: Any = [begin_copy(on_gpu(float(n)), unused) for n in range(TOGETHER)]
    assert [wait().tolist() for wait in waits] == [[n] * 4 for n in range(TOGETHER)]
    begin_copy(on_gpu(9.0), unused)
    assert [len(each) for each in unused.values()] == [TOGETHER - 1], "memory is used again"


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
