"""A layer's messages over communicators that have no channel, as a user's own."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess, wire
from multibn.communicators.handshake import all_ranks_agree
from multibn.communicators.layer_communicator import LayerCommunicator, reject_input
from multibn.communicators.nonfinite import raise_for_nan_gradients
from multibn.engine.consistency import check_equal
from multibn.engine.statistics import Moments, aggregate
from tests.communicators.phases import Phase, errors_of
from tests.helpers.ranks import EqualRanks, ThreadCommunicator, run_ranks

C = 3
LENGTH = 2 * C + 2  # of a layer's numbers

_check_equal: Any = partial(check_equal, parameters=(), statistics=())


class Own:
    """A user's own class over ranks as threads, with other members if they are given."""

    def __init__(self, world: Any, **members: Any) -> None:
        self.rank, self.size, self.split = world.rank, world.size, world.split
        self.allreduce = world.allreduce
        vars(self).update(members)


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
    with pytest.raises(TypeError) as raised:
        Phase(Own(EqualRanks(), allreduce=allreduce), "0").allreduce(np.ones(LENGTH))
    error = str(raised.value)
    assert error.startswith("`allreduce` of Own must return the sum over 2 ranks, an")
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
    start = "`rank`, `size` and `allreduce` of Own are inconsistent: the sum of "
    ones = np.ones(LENGTH)

    def work(world: ThreadCommunicator) -> None:
        summed = wrong.get("sum", lambda x, total: total)
        own = Own(world, allreduce=lambda x: summed(x, world.allreduce(x.copy())))
        vars(own).update(wrong)
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

        own = Own(world, allreduce=allreduce)
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

        phase = Phase(Own(world, allreduce=allreduce), "0")
        phase.allreduce(np.ones(LENGTH))
        is_wrong.append(True)
        with pytest.raises(TypeError) as raised:
            phase.allreduce(np.ones(LENGTH))
        return raised.value

    for error in run_ranks(2, work):
        assert re.fullmatch(
            r"`allreduce` of Own must return the sum over 2 ranks, an array like its "
            r"argument: got a different sum in layer 0 \(forward, .*\), on "
            r"rank \d\. Correct this method\.",
            str(error),
        )


def _strict(world: ThreadCommunicator) -> Any:
    """A user's own class, whose transport refuses messages of unlike lengths."""

    def allreduce(x: Any, /) -> Any:
        assert len({shape for shape, _ in world._exchange((x.shape, x.dtype))}) == 1
        return world.allreduce(x)

    return Own(world, allreduce=allreduce)


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
        own = _strict(world)
        phases = [Phase(own, f"bn{n}") for n in range(num_layers)]
        for n, phase in enumerate(phases):
            phase.allreduce(np.ones(LENGTH + 2 * n))
        if world.rank:
            other(own)
        phases[0].allreduce(np.ones(LENGTH))

    for error in errors_of(2, work):
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
        own = _strict(world)
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

    for error in errors_of(2, work):
        assert str(error).endswith(end)


def test_a_communicator_without_a_hash_is_compared_once_for_each_layer() -> None:
    """Where one rank alone comes into another phase, its message is as long as the others'."""

    def work(world: ThreadCommunicator) -> None:
        own: Any = SimpleNamespace(rank=world.rank, size=2)
        vars(own).update(allreduce=world.allreduce, split=world.split)
        layer = LayerCommunicator(own, lambda: "bn")
        for dtype in ("float32", "float32", "float64" if world.rank else "float32"):
            layer.for_phase("forward", np.dtype(dtype), LENGTH).allreduce(np.ones(LENGTH))

    for error in errors_of(2, work):
        assert "rank(s) [1] in bn (forward, float64, call 1)" in str(error)


def test_calls_are_counted_on_where_options_change() -> None:
    """The phase of options that a layer had before goes on, too: a backward pass may follow."""
    options = {"eps": 1e-5}
    layer = LayerCommunicator(SingleProcess(), lambda: "bn", options=lambda: options)
    kept = []
    for eps in (1e-5, 1e-3):
        options["eps"] = eps
        layer.refresh_options()
        layer.plans["an input"] = eps
        kept.append(layer.for_phase("forward", np.dtype("f4"), LENGTH))
        assert layer.plans == {"an input": eps}
    for number, phase in enumerate((*kept, *kept), 1):
        phase.allreduce(np.ones(LENGTH))
        assert str(phase) == f"bn (forward, float32, call {number})"


def test_the_size_of_a_users_class_may_be_an_integer_of_numpy() -> None:
    def work(world: ThreadCommunicator) -> None:
        own = Own(world, rank=np.int32(world.rank), size=np.int32(2))
        summed = Phase(own, "0").allreduce(np.ones(LENGTH))
        np.testing.assert_array_equal(summed, 2 * np.ones(LENGTH))

    run_ranks(2, work)


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
