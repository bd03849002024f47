"""Loops in step, over ranks as threads, and what stands in for a missing batch."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from multibn import SingleProcess
from multibn.communicators import Communicator
from multibn.engine.lockstep import END, Lockstep
from multibn.torch_backend import SyncBatchNorm, join, sync_running_stats, update_bn_stats
from multibn.torch_backend.train.join import Joined, tensors_in
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

NEEDS = "torch"


def test_each_step_has_a_batch_and_the_total_size() -> None:
    def steps(world: Communicator) -> list[Any]:
        data = [[3, 1], [], [4]][world.rank]
        return list(Lockstep(data, world, source="the data", place="a step", size_of=int))

    of_ranks = run_ranks(3, steps)
    assert [[s.batch for s in steps] for steps in of_ranks] == [[3, 1], [END, END], [4, END]]
    assert [[s.total_size for s in steps] for steps in of_ranks] == [[7, 1]] * 3


def _raise_stop_iteration(_: Any) -> int:
    raise StopIteration


class _WithoutIterator:
    def __iter__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    ("data", "size_of", "kind", "message"),
    [
        (["one"], int, ValueError, "invalid literal"),
        ([1], _raise_stop_iteration, RuntimeError, "generator raised StopIteration"),
        (_WithoutIterator(), int, RuntimeError, "generator raised StopIteration"),
    ],
)
def test_an_error_of_the_data_is_one_on_all_ranks(
    data: Any, size_of: Any, kind: Any, message: str
) -> None:
    def steps(world: Communicator) -> None:
        is_wrong = world.rank == 1
        found = Lockstep(
            data if is_wrong else [1],
            world,
            source="the data",
            place="a step",
            size_of=size_of if is_wrong else int,
        )
        others = RuntimeError, r"^the data raised on rank\(s\) \[1\] of 2"
        expected, match = (kind, message) if is_wrong else others
        with pytest.raises(expected, match=match):
            next(found)
        assert list(found) == []

    run_ranks(2, steps)


def test_too_few_batches_are_an_error_on_all_ranks() -> None:
    def steps(world: Communicator) -> None:
        for data, everywhere, message in (
            ([], False, r"one batch: got none on rank\(s\) \[0, 1\] of 2"),
            ([1] * world.rank, True, r"one batch on every rank: got none on rank\(s\) \[0\] of 2"),
        ):
            found = Lockstep(iter(data), world, source="", place="", everywhere=everywhere)
            with pytest.raises(ValueError, match=message):
                next(found)
            assert list(found) == []

    run_ranks(2, steps)


def test_a_loop_that_was_left_tells_the_others_once() -> None:
    world = CountingCommunicator(SingleProcess())
    steps = Lockstep([1, 2, 3], world, source="the data", place="a step")
    next(steps)
    steps.leave()
    steps.leave()
    assert next(steps, None) is None
    assert len(world.messages) == 2


def test_the_mean_leaves_stand_ins_out() -> None:
    def means(world: Communicator) -> list[tuple[bool, float]]:
        counting = CountingCommunicator(world)
        joined = Joined(counting, lambda batch: batch)
        found = [
            (joined.exhausted, float(joined.mean(torch.ones(len(batch), dtype=torch.float64))))
            for batch in joined([[1, 2], [3]][world.rank :])
        ]
        assert counting.take() == [3, 1, 3, 1, 3]  # a step and its mean, and the end
        return found

    assert run_ranks(2, means) == [[(False, 4 / 3), (False, 2.0)], [(False, 2 / 3), (True, 0.0)]]


Pair = namedtuple("Pair", "a b")


def test_an_empty_batch_has_the_structure_of_a_batch() -> None:
    x = torch.ones(2, 3)
    batch = Pair([x, {"x": x.int(), "name": "n"}], OrderedDict(scalar=torch.tensor(1.0)))

    def last(world: Communicator) -> Any:
        with join(nn.Flatten(), world) as joined:
            return list(joined([batch] * (2 - world.rank)))[-1]

    whole, empty = run_ranks(2, last)
    assert whole is batch
    assert isinstance(empty, Pair)
    assert isinstance(empty.b, OrderedDict)
    assert empty.a[0].shape == empty.a[1]["x"].shape == (0, 3)
    assert (empty.a[1]["x"].dtype, empty.a[1]["name"]) == (torch.int32, "n")
    assert empty.b["scalar"] == 1
    assert x.shape == batch.a[0].shape == (2, 3)


X = torch.ones(2)


@pytest.mark.parametrize(
    "batch, message",
    [
        ("no tensor", "a tensor whose first dimension is the batch: got str"),
        *(
            ((X, other), f"only tensors, numbers, strings and None: got {type(other).__name__}")
            for other in (np.ones(2), SimpleNamespace(x=X), pack_sequence([X]))
        ),
    ],
)
def test_a_batch_without_an_empty_one_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"{message}\. Pass `empty`"):
        next(join(nn.Flatten(), SingleProcess())([batch]))


def test_an_empty_batch_can_be_made_by_the_user() -> None:
    def last(world: Communicator) -> Any:
        with join(nn.Flatten(), world, empty=lambda batch: "nothing") as joined:
            return list(joined(["a", "b"][world.rank :]))[-1]

    assert run_ranks(2, last) == ["b", "nothing"]


def test_an_exception_in_the_loop_is_not_communicated() -> None:
    def failing(world: Communicator) -> None:
        with join(nn.Flatten(), world) as joined:
            for _ in joined([torch.ones(1)]):
                raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        run_ranks(2, failing)


def test_losses_that_are_reduced_already_are_refused() -> None:
    with join(nn.Flatten(), SingleProcess()) as joined:
        for _ in joined([torch.ones(1)]):
            with pytest.raises(ValueError, match=r'got shape \(\).*Pass reduction="none"'):
                joined.mean(torch.tensor(1.0))
            np.testing.assert_allclose(joined.mean(torch.tensor([1.0, 2.0])), 1.5)


class _Wrapper(MutableMapping[str, Any]):
    """A batch whose shallow copies have the same dictionary."""

    def __init__(self, **items: Any) -> None:
        self.wrapped = items

    def __getitem__(self, key: str) -> Any:
        return self.wrapped[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.wrapped[key] = value

    def __delitem__(self, key: str) -> None:
        del self.wrapped[key]

    def __iter__(self) -> Any:
        return iter(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)


class _Lazy(_Wrapper):
    """A batch that makes its tensors when they are asked for."""

    def __getitem__(self, key: str) -> Any:
        return self.wrapped[key].clone()


class _Pair(tuple):
    def __new__(cls, x: Any, y: Any) -> Any:
        return super().__new__(cls, (x, y))


def test_a_stand_in_may_be_changed() -> None:
    """Each step has a new one, and the loader's batch stays as it was."""

    def work(world: ThreadCommunicator) -> list[tuple[int, ...]]:
        first = {"x": torch.ones(2, 3, requires_grad=True), "y": torch.ones(2)}
        shapes = []
        for kind in (dict, _Wrapper):
            batches: Any = [kind(**first) for _ in range(1 if world.rank else 3)]
            for batch in join(nn.Flatten(), world)(batches):
                assert batch["x"].requires_grad
                shapes.append(tuple(batch["x"].unsqueeze(0).shape))
                del batch["y"]
                batch["x"] = None
        return shapes

    here, there = run_ranks(2, work)
    assert here == [(1, 2, 3)] * 6
    assert there == [(1, 2, 3), (1, 0, 3), (1, 0, 3)] * 2
    pair = _Pair(torch.ones(2), torch.ones(3))
    assert len(tensors_in(pair)) == 2
    message = r"use types that copy\.deepcopy can copy: got _Pair\. Pass `empty`, a function"
    with pytest.raises(TypeError, match=message):
        next(join(nn.Flatten())([pair]))
    message = r"mappings that hold the tensors that .*: got _Lazy\. Pass"
    with pytest.raises(TypeError, match=message):
        next(join(nn.Flatten())([_Lazy(x=torch.ones(2))]))
    assert next(join(nn.Flatten(), empty=lambda batch: batch)([pair])) is pair


def test_losses_are_those_of_the_batch_in_hand() -> None:
    """The loop may have fetched another one since."""

    def work(world: ThreadCommunicator) -> list[float]:
        with join(nn.Flatten(), world) as joined:
            loop = joined([torch.full((2,), 1.0 + world.rank)] * (1 if world.rank else 3))
            first, _ = next(loop), next(loop)
            parts = [float(joined.mean(first))]
            half = torch.ones(2, 300, 300, dtype=torch.float16)
            mean = joined.mean(half)
            assert mean.dtype == torch.float16
            return [*parts, float(mean)]

    assert sum(part for part, _ in run_ranks(2, work)) / 2 == 1.5
    assert [half for _, half in run_ranks(2, work)] == [1.0, 1.0]
    with pytest.raises(TypeError, match="`losses` must be a tensor: got list"):
        join(nn.Flatten()).mean([1.0])  # type: ignore[arg-type]


def _zipped(joined: Joined, data: Any) -> int:
    return sum(1 for _ in zip(joined(data), joined(data), strict=True))


def _nested(joined: Joined, data: Any) -> int:
    return sum(1 for _ in joined(data) for _ in joined(data))


def _left_inside(joined: Joined, data: Any) -> None:
    for _ in joined(data):
        joined.close()


@pytest.mark.parametrize("go", [_zipped, _nested, _left_inside])
def test_loops_at_a_time_need_a_join_each(go: Any) -> None:
    def work(world: ThreadCommunicator) -> None:
        data = [torch.ones(2)] * 3
        with pytest.raises(RuntimeError, match=r"this join.. loop was resumed after another one"):
            go(join(nn.Flatten(), world), data)
        loops = [join(nn.Flatten(), world)(data) for _ in range(2)]
        assert sum(1 for _ in zip(*loops, strict=True)) == 3

    run_ranks(2, work)


def _in_join(model: nn.Module, world: Communicator) -> None:
    with join(model, process_group=world) as joined:
        for _ in joined([torch.ones(2, 3)]):
            pass


def _in_mean(model: nn.Module, world: Communicator) -> None:
    with join(model, process_group=world) as joined:
        joined.mean(torch.ones(2))


PLACES: dict[str, Callable[[nn.Module, Communicator], object]] = {
    "join()": _in_join,
    "the mean of join's losses": _in_mean,
    "sync_running_stats": lambda model, world: sync_running_stats(model, process_group=world),
    "a step of precise batch norm": lambda model, world: update_bn_stats(
        model, [torch.ones(2, 3)], process_group=world, progress=False
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_over_a_users_class_no_array_is_added_to_a_layers_message(place: str) -> None:
    """All ranks are told, whatever the lengths of the two messages."""

    def work(world: ThreadCommunicator) -> str:
        model = SyncBatchNorm(3, process_group=world)
        model(torch.ones(2, 3) + world.rank)
        go_on = PLACES[place] if world.rank == 0 else lambda model, world: model(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="the ranks are in different places") as error:
            go_on(model, world)
        return str(error.value)

    for text in run_ranks(2, work):
        assert place in text
        assert "rank(s) [1] in " in text
