"""Statistics of a first pass, replayed: the tape, and torch's checkpointing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from multibn import SingleProcess
from multibn.engine import BatchStatistics, recording, replaying
from multibn.engine.recompute import in_recomputing, record, replayed
from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts

NEEDS = "torch"

ONES = np.ones(3)


def taped(compute: Callable[[], BatchStatistics], channels: tuple[int, ...]) -> BatchStatistics:
    batch = replayed(channels)
    if batch is None:
        batch = compute()
        record(batch)
    return batch


def batch(value: float) -> BatchStatistics:
    return BatchStatistics(value * ONES, ONES, np.array(1.0), np.array(1.0))


def never() -> BatchStatistics:
    raise AssertionError("computed again")


def test_a_tape_is_replayed_in_order_and_again() -> None:
    with recording() as tape:
        for value in (1.0, 2.0):
            taped(lambda value=value: batch(value), (3,))  # type: ignore[misc]
        assert not in_recomputing()
    replay = replaying(tape)
    for _ in range(2):  # a backward pass with retain_graph may come twice
        with replay:
            assert in_recomputing()
            assert [taped(never, (3,)).mean[0] for _ in range(2)] == [1, 2]
    assert not in_recomputing()
    assert taped(lambda: batch(3.0), (3,)).mean[0] == 3
    assert len(tape) == 2


def test_a_checkpoint_may_be_inside_a_checkpoint() -> None:
    """The inner block's first pass is part of both; the outer's second feeds a new inner one."""
    with recording() as outer, recording() as inner:
        taped(lambda: batch(1.0), (3,))
    assert outer == inner
    with replaying(outer), recording() as again:
        taped(never, (3,))
    assert again == outer
    with recording() as around:
        with replaying(inner):
            taped(never, (3,))
        taped(lambda: batch(2.0), (3,))
    assert [b.mean[0] for b in around] == [2]


def test_a_pass_that_differs_is_an_error() -> None:
    tape = [batch(1.0)]
    with replaying(tape):
        with pytest.raises(RuntimeError, match=r"has channels \(4,\) where the first pass had \(3"):
            taped(never, (4,))
        taped(never, (3,))
        with pytest.raises(RuntimeError, match="the first pass had none"):
            taped(never, (3,))
    tape.append(batch(2.0))
    with (
        pytest.raises(RuntimeError, match=r"ran 1 of the 2 batch norms.*after the backward pass\."),
        replaying(tape),
    ):
        taped(never, (3,))
    assert not in_recomputing()


def test_the_stack_is_restored_after_an_error() -> None:
    """Which comes through, also with batch norms left."""
    tape = [batch(1.0)]
    with pytest.raises(KeyError), recording(), replaying(tape):
        raise KeyError
    assert not in_recomputing()


def test_a_pass_that_torch_ends_early_is_not_an_error() -> None:
    """The pass ends when torch has what the backward pass needs, perhaps before a batch norm."""
    norm: Any = SyncBatchNorm(4, process_group=SingleProcess())
    begun, ended = [], []

    def block(x: Any) -> Any:
        begun.append(x)
        y = x.sin()
        with torch.no_grad():
            norm(x)
        ended.append(x)
        return y

    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos(), rtol=0, atol=0)
    assert (len(begun), len(ended), int(norm.num_batches_tracked)) == (2, 1, 1)
