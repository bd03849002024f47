"""A layer's messages over communicators that have no channel: a user's own, and GPUs'."""

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

from multibn import SingleProcess, wire
from multibn.communicators.deferred_checks import begin_copy, is_captured, on_stream
from multibn.communicators.handshake import all_ranks_agree
from multibn.communicators.layer_communicator import LayerCommunicator, reject_input
from multibn.communicators.nonfinite import raise_for_nan_gradients
from multibn.engine.consistency import check_equal
from multibn.engine.statistics import Moments, aggregate
from tests.communicators.phases import Phase
from tests.communicators.transports import standin_cupy
from tests.helpers import require
from tests.helpers.ranks import EqualRanks, ThreadCommunicator, run_ranks

C = 3
LENGTH = 2 * C + 2  # of a layer's numbers
TOGETHER = 4  # messages at which the host looks together, while as many others are sent


_check_equal: Any = partial(check_equal, parameters=(), statistics=())


def _errors(size: int, work: Callable[[ThreadCommunicator], object]) -> list[Exception]:
    """The error of each rank; all of them must raise, and none may wait for another."""

    def run(world: ThreadCommunicator) -> Exception:
        try:
            work(world)
        except Exception as error:
            return error
        raise AssertionError(f"no error on rank {world.rank}")

    return run_ranks(size, run)


@pytest.fixture(params=["numpy", "cupy"])
def ones(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes arrays of ones, in host memory or on a GPU."""
    if request.param == "numpy":
        yield np.ones
        return
    require.need("a machine without CuPy")
    with standin_cupy.installed() as cupy:
        yield lambda n: cupy.asarray(np.ones(n))


on_a_gpu = pytest.mark.parametrize("ones", ["cupy"], indirect=True)


@pytest.mark.parametrize("size", [2, 3])
def test_unlike_layers_are_named_on_all_ranks_at_the_first_message(ones: Any, size: int) -> None:
    def work(world: ThreadCommunicator) -> None:
        name = "layer1.bn2" if world.rank == 1 else "layer1.bn1"
        Phase(world, name).allreduce(ones(LENGTH))

    for error in _errors(size, work):
        assert isinstance(error, RuntimeError)
        assert "the ranks are in different places: rank(s) [0" in str(error)
        assert "rank(s) [1] in layer1.bn2. All ranks must run the same layers" in str(error)


def test_unlike_channels_are_named_before_messages_of_unlike_sizes(ones: Any) -> None:
    def work(world: ThreadCommunicator) -> None:
        Phase(world, "0").allreduce(ones(2 * (C + world.rank) + 2))

    for error in _errors(2, work):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "the ranks have built layer 0 differently: rank(s) [0] with 3 channels; rank(s) [1] "
            "with 4 channels. Build the same model on all ranks."
        )


@pytest.mark.parametrize(
    "allreduce, found",
    [
        (lambda x: None, "got None for"),
        (lambda x: (2 * x).tolist(), "got ["),
        (lambda x: (2 * x).astype("float32"), "dtype=float32) for"),
        (lambda x: 2 * x[1:], "got array(["),
    ],
)
def test_a_sum_that_is_none_is_a_mistake_of_the_communicators_class(
    allreduce: Callable[[Any], Any], found: str
) -> None:
    own: Any = SimpleNamespace(rank=0, size=2, allreduce=allreduce, split=print)
    with pytest.raises(TypeError) as raised:
        Phase(own, "0").allreduce(np.ones(LENGTH))
    error = str(raised.value)
    assert error.startswith("`allreduce` of SimpleNamespace must return the sum over 2 ranks, an")
    assert found in error
    assert error.endswith(" on rank 0. Correct this method.")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"size": 3}, r"must be \[3\.0, 3\.0, .*\]: got \[2\.0, .*\], on rank \d of 3\. Correct"),
        ({"size": 0}, r"must be \[0\.0, .*\]: got \[2\.0, 1\.0, 0\.0, .*\], on rank \d of 0\. Co"),
        ({"size": "2"}, r"must be \[nan, .*\]: got \[2\.0, 1\.0, nan, .*\], on rank \d of '2'\. C"),
        ({"rank": 0}, r"must be \[2\.0, 1\.0, .*\]: got \[2\.0, 0\.0, .*\], on rank 0 of 2\. Corr"),
        ({"rank": None}, r"must be \[2\.0, 1\.0, .*\]: got \[2\.0, nan, .*\], on rank None of 2"),
        ({"sum": lambda x, _: x * 0.7}, r": got \[0\.7, "),
        ({"sum": lambda x, total: total / 2}, r": got \[1\.0, "),  # a mean
        ({"sum": lambda x, total: total * 2}, r": got \[4\.0, "),
        ({"sum": lambda x, total: np.round(total, 7)}, r": got \[2\.0, 1\.0, 4\.0, 2\.0\]"),
    ],
)
def test_members_that_do_not_fit_are_named_on_all_ranks(wrong: Any, message: str) -> None:
    start = "`rank`, `size` and `allreduce` of Own do not fit: the sum of "
    ones = np.ones(LENGTH)

    def work(world: ThreadCommunicator) -> None:
        def allreduce(x: Any) -> Any:
            total = world.allreduce(x.copy())
            return wrong["sum"](x, total) if "sum" in wrong else total

        members = {"rank": world.rank, "size": 2, "allreduce": allreduce} | wrong
        own: Any = type("Own", (), {"split": world.split})()
        vars(own).update(members)
        for call in (lambda: _check_equal({}, own), lambda: Phase(own, "0").allreduce(ones)):
            with pytest.raises(TypeError, match=f"^{start}.*{message}"):
                call()

    run_ranks(2, work)


def test_a_class_that_sums_in_place_is_understood() -> None:
    """Although it should return a new array."""

    def work(world: ThreadCommunicator) -> None:
        def allreduce(x: Any) -> Any:
            x[...] = world.allreduce(x.copy())
            return x

        own: Any = SimpleNamespace(rank=world.rank, size=2, allreduce=allreduce, split=world.split)
        phase = Phase(own, "0")
        for _ in range(2):
            assert phase.allreduce(np.ones(LENGTH)).tolist() == [2.0] * LENGTH
        _check_equal({"a": np.ones(3)}, own)

    run_ranks(2, work)


def test_a_later_sum_that_is_none_is_a_mistake_of_the_class_too() -> None:
    def work(world: ThreadCommunicator) -> Exception:
        is_wrong: list[bool] = []

        def allreduce(x: Any) -> Any:
            off = 1e-9 if is_wrong and is_wrong.pop() else 0.0
            return world.allreduce(x) * (1 + off)

        own: Any = SimpleNamespace(rank=world.rank, size=2, allreduce=allreduce, split=world.split)
        phase = Phase(own, "0")
        phase.allreduce(np.ones(LENGTH))
        is_wrong.append(True)
        with pytest.raises(TypeError) as raised:
            phase.allreduce(np.ones(LENGTH))
        return raised.value

    for error in run_ranks(2, work):
        assert re.fullmatch(
            r"`allreduce` of SimpleNamespace must return the sum over 2 ranks, an array like its "
            r"argument: got other numbers in layer 0 \(forward, .*\), where all ranks are, on rank "
            r"\d\. Correct this method\.",
            str(error),
        )


class _Own:
    """A user's own class, whose transport refuses messages of unlike lengths."""

    def __init__(self, world: ThreadCommunicator) -> None:
        self.rank, self.size, self.world = world.rank, world.size, world

    def allreduce(self, x: Any, /) -> Any:
        assert len({shape for shape, _ in self.world._exchange((x.shape, x.dtype))}) == 1
        return self.world.allreduce(x)

    def split(self, color: int, key: int = 0) -> Any:
        return self


@pytest.mark.parametrize(
    "other, named",
    [
        (lambda own: all_ranks_agree(own, "average_gradients", "a"), "average_gradients"),
        (lambda own: raise_for_nan_gradients(own, True), "the search for NaN in the gradient"),
        (lambda own: _check_equal({"w": np.ones(1)}, own), "check_sync"),
        (lambda own: Phase(own, "new").allreduce(np.ones(4)), "the first message of new"),
        (lambda own: Phase(own, "new").allreduce(np.ones(40)), "the first message of new"),
    ],
)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_unlike_messages_meet_in_an_error_over_a_users_own_class(
    other: Callable[[Any], Any], named: str, num_layers: int
) -> None:
    def work(world: ThreadCommunicator) -> None:
        own: Any = _Own(world)
        phases = [Phase(own, f"bn{n}") for n in range(num_layers)]
        for n, phase in enumerate(phases):
            phase.allreduce(np.ones(LENGTH + 2 * n))
        if world.rank:
            other(own)
        phases[0].allreduce(np.ones(LENGTH))

    for error in _errors(2, work):
        assert isinstance(error, RuntimeError)
        assert "the ranks are in different places: rank(s) [0] in bn0 (forward," in str(error)
        assert f"rank(s) [1] in {named}" in str(error)


@pytest.mark.parametrize(
    "send, place",
    [
        (lambda own, wider: all_ranks_agree(own, "average_gradients"), "average_gradients"),
        (lambda own, wider: wider.allreduce(np.ones(LENGTH + 2)), "bn1 (forward, float32, call 2)"),
    ],
)
def test_a_refused_input_meets_any_message_of_a_users_own_class(
    send: Callable[..., Any], place: str
) -> None:
    def work(world: ThreadCommunicator) -> str:
        own: Any = _Own(world)
        phases = [Phase(own, f"bn{n}") for n in (0, 1)]
        for n, phase in enumerate(phases):
            phase.allreduce(np.ones(LENGTH + 2 * n))
        if world.rank:
            reject_input(phases[0].layer)  # the rank that refuses raises by itself
            return ""
        with pytest.raises(RuntimeError) as raised:
            send(own, phases[1])
        return str(raised.value)

    said = f"rank 0 stops in {place}: the input was rejected on rank(s) [1] of 2. See the error"
    assert run_ranks(2, work)[0].startswith(said)


@pytest.mark.parametrize(
    "phase, end",
    [
        ("backward", "or call the layer with an empty batch, layer(x[:0]).sum()."),
        ("forward", "and all must be in training or all in evaluation."),
    ],
)
def test_a_loss_that_leaves_a_layer_out_is_named_as_the_cause(phase: str, end: str) -> None:
    def work(world: ThreadCommunicator) -> None:
        layers = [Phase(world, name, phase) for name in "ab"]
        for layer in layers:
            layer.allreduce(np.ones(LENGTH))
        layers[world.rank].allreduce(np.ones(LENGTH))

    for error in _errors(2, work):
        assert str(error).endswith(end)


def test_a_communicator_without_a_hash_is_compared_once_for_each_layer() -> None:
    """Where one rank alone comes into another phase, its message is as long as the others'."""

    def work(world: ThreadCommunicator) -> None:
        own: Any = SimpleNamespace(rank=world.rank, size=2)
        vars(own).update(allreduce=world.allreduce, split=world.split)
        layer = LayerCommunicator(own, lambda: "bn")
        for dtype in ("float32", "float32", "float64" if world.rank else "float32"):
            layer.for_phase("forward", np.dtype(dtype), LENGTH).allreduce(np.ones(LENGTH))

    for error in _errors(2, work):
        assert "rank(s) [1] in bn (forward, float64, call 1)" in str(error)


def test_calls_are_counted_on_where_options_change() -> None:
    """The phase of options that a layer had before goes on, too: its plan is kept."""
    options = {"eps": 1e-5}
    layer = LayerCommunicator(SingleProcess(), lambda: "bn", options=lambda: options)
    kept = []
    for eps in (1e-5, 1e-3):
        options["eps"] = eps
        layer.look_at_options()
        layer.plans["an input"] = eps
        kept.append(layer.for_phase("forward", np.dtype("f4"), LENGTH))
    options["eps"] = 1e-5
    layer.look_at_options()
    assert layer.plans == {"an input": 1e-5}
    for number, phase in enumerate((*kept, *kept), 1):
        phase.allreduce(np.ones(LENGTH))
        assert str(phase) == f"bn (forward, float32, call {number})"


def test_the_size_of_a_users_class_may_be_an_integer_of_numpy() -> None:
    def work(world: ThreadCommunicator) -> None:
        own: Any = SimpleNamespace(rank=np.int32(world.rank), size=np.int32(2))
        vars(own).update(allreduce=world.allreduce, split=world.split)
        summed = Phase(own, "0").allreduce(np.ones(LENGTH))
        np.testing.assert_array_equal(summed, 2 * np.ones(LENGTH))

    run_ranks(2, work)


def test_unlike_layers_are_named_later(ones: Any) -> None:
    """A GPU's are named some messages later: by then a message has long arrived in host memory."""

    def work(world: ThreadCommunicator) -> None:
        layers = [Phase(world, name) for name in ("bn1", "bn2")]
        for layer in layers:
            summed = layer.allreduce(ones(LENGTH))
            host = summed.get() if hasattr(summed, "get") else summed
            np.testing.assert_array_equal(host, [2.0] * (2 * C + 2))
        for layer in reversed(layers) if world.rank == 1 else layers:
            layer.allreduce(ones(LENGTH))
        for layer in layers * TOGETHER:
            layer.allreduce(ones(LENGTH))
            sent[world.rank] += 1

    sent = [0, 0]
    for rank, error in enumerate(_errors(2, work)):
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


def test_layers_of_unlike_widths_meet_in_messages_of_one_length(ones: Any) -> None:
    """They would meet in the transport, with unlike sizes: a hang, or an error of its own."""

    def work(world: ThreadCommunicator) -> None:
        layers = [(Phase(world, f"bn{n}"), n) for n in (LENGTH, 2 * LENGTH)]
        for layer, n in layers:
            assert layer.allreduce(ones(n)).shape == (n,)
        layer, n = layers[world.rank % 2]
        for _ in range(2 * TOGETHER):
            layer.allreduce(ones(n))

    for error in _errors(2, work):
        assert isinstance(error, RuntimeError)
        assert "in different places" in str(error)


@on_a_gpu
@pytest.mark.parametrize(
    "spoiled, kind, expected",
    [
        pytest.param(
            np.inf,
            FloatingPointError,
            r"of an earlier call, bn \(forward, float32, call 1\), are not finite:",
            id="infinity is named by every rank",
        ),
        pytest.param(
            wire.rank_bit(1),
            FloatingPointError,
            r"NaN, infinity or values that overflow on rank\(s\) \[1\] of 2\. Check",
            id="a rank whose input is not finite is named by every rank",
        ),
        pytest.param(
            None,
            RuntimeError,
            r"^rank {rank} stops in an earlier call, bn \(forward, .*, call 1\): the "
            r"input was rejected on rank\(s\) \[1\] of 2\. See the error on that rank\.$",
            id="a refusal is told to every rank",
        ),
    ],
)
@pytest.mark.parametrize("copied", [(False, False), (True, True), (False, True), (True, False)])
def test_a_spoiled_message_on_a_gpu_is_an_error_some_messages_later(
    ones: Any,
    copied: tuple[bool, bool],
    spoiled: float | None,
    kind: type[Exception],
    expected: str,
) -> None:
    """Eager layers and compiled ones behave alike, also where one follows the other."""

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

    for rank, error in enumerate(_errors(2, work)):
        assert isinstance(error, kind)
        assert re.search(expected.format(rank=rank), str(error))


@on_a_gpu
def test_the_last_messages_of_a_run_are_looked_at_by_check_sync(ones: Any) -> None:
    equal = EqualRanks()
    layer = Phase(equal, "bn")
    layer.allreduce(ones(LENGTH) + np.inf)
    with pytest.raises(FloatingPointError, match=r"an earlier call, bn \(forward, .* call 1\)"):
        _check_equal({}, SingleProcess())
    _check_equal({}, SingleProcess())
    gone = Phase(equal, "gone")
    gone.allreduce(ones(LENGTH) + np.inf)
    reference = ref(gone)
    del gone
    gc.collect()
    assert reference() is None, "a message keeps no model alive"
    _check_equal({}, SingleProcess())


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes tensors that say they are on a GPU, with stand-ins for torch's events and streams."""
    require.need("torch")
    import torch

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
    import torch

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
    import torch

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
    import torch

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
    import torch

    from multibn.communicators.transports.torch_distributed import _Transport

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


@pytest.mark.parametrize("scale", [0.25, 1e-3, 1.0, 1e6])
def test_a_common_factor_of_the_weights_changes_nothing(scale: float) -> None:
    """Weights count in relation to each other: a common factor changes nothing."""
    batches = [np.array([1.0, 2.0, 6.0]), np.array([5.0])]
    weights = [3.0 * scale, 1.0 * scale]

    def work(world: ThreadCommunicator) -> Any:
        x = batches[world.rank]
        moments = Moments(
            np.array([x.mean()]), np.array([(x**2).mean()]), len(x), weights[world.rank]
        )
        return aggregate(moments, world, weighting="sample")

    for batch in run_ranks(2, work):
        np.testing.assert_allclose(batch.mean, [3.5], rtol=1e-15)
        np.testing.assert_allclose(batch.var, [66 / 4 - 3.5**2], rtol=1e-14)
        assert batch.count == 4


def test_the_layout_of_messages() -> None:
    assert wire.length(C) == wire.HEAD + wire.forward_payload(C) == 2 * C + 4
    assert wire.num_channels("forward", wire.forward_payload(C)) == C
    assert wire.num_channels("backward", wire.backward_payload(C)) == C


@pytest.mark.parametrize("size", [1, 3, 8192])
def test_the_sum_of_heads_tells_unlike_ranks_and_those_that_refuse(size: int) -> None:
    most = 2.0**20 - 1
    for v in (0.0, 1.0, most):
        total = size * np.array(wire.head(v))
        assert wire.all_equal(total.tolist(), size)
        for other in {1.0, most - 1} - {v}:
            unlike = total - wire.head(v) + wire.head(other)
            assert wire.all_equal(unlike.tolist(), size) == (size == 1)
            assert not wire.is_refused(unlike.tolist())
        for mark in (wire.rank_bit(0), wire.rank_bit(49), wire.NO_BIT):
            refused = (total + wire.head(mark)).tolist()
            assert wire.is_refused(refused)
            assert not wire.all_equal(refused, size)
            assert wire.ranks_of(refused[:1]) == [
                rank for rank in range(50) if wire.rank_bit(rank) == mark
            ]


def test_the_ranks_that_have_sent_marks_are_read_from_the_sum_with_all_finite_numbers() -> None:
    rng = np.random.default_rng(0)
    for size, marking in ((50, [0, 7, 49]), (1, [0]), (8192, [3]), (50, range(50)), (51, [50])):
        largest = rng.uniform(-1, 1, size) * wire.LARGEST
        sent = [wire.rank_bit(rank) if rank in marking else v for rank, v in enumerate(largest)]
        for order in (sent, sent[::-1]):
            numbers = np.array([0.0, 0.0, 1.0, 1.0])
            for v in order:
                numbers[1] += v
            (found,) = wire.rank_bits_in(numbers)
            assert wire.ranks_of([found]) == [rank for rank in marking if rank < 50]
    assert wire.rank_bits_in(np.array([wire.LARGEST * 8192, 1.0, 8192.0])) == []
