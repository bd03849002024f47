"""Channel over gloo, with ranks as threads."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import require
from tests.helpers.ranks import ThreadCommunicator, run_ranks

require.need("torch")

import torch.distributed as dist  # noqa: E402

from multibn.communicators.polling import chain  # noqa: E402
from multibn.communicators.transports.gloo import BlockAllreduce, PrivateGloo  # noqa: E402

SECONDS = 60.0


def _opened(side: PrivateGloo, number: int) -> BlockAllreduce:
    opened: list[BlockAllreduce] = []
    assert chain(side.open_allreduce(number), opened.append)(SECONDS)
    return opened[0]


def _on_ranks(size: int, work: Callable[[PrivateGloo, int], Any]) -> list[Any]:
    """What `work(side, rank)` returns on each rank."""
    store = dist.HashStore()

    def run(world: ThreadCommunicator) -> Any:
        side = PrivateGloo(store, world.rank, size)
        result = work(side, world.rank)
        world._exchange(None)
        side.close(failed=False)
        return result

    return run_ranks(size, run)


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param([(0, np.ones(3)), (0, np.ones(4))], id="lengths"),
        pytest.param([(0, np.ones(3)), (0, np.ones(5000))], id="lengths, one with a rest"),
        pytest.param([(0, np.ones(4)), (0, np.ones((2, 2)))], id="shapes"),
        pytest.param([(0, np.ones(4)), (0, np.ones(4, np.float32))], id="dtypes"),
        pytest.param([(42, np.ones(4)), (62, np.ones(4))], id="lines"),
    ],
)
def test_unlike_messages_never_meet(unlike: list[tuple[int, Any]]) -> None:
    """Gloo itself would end the process; the arrays stay as they are."""

    def work(side: PrivateGloo, rank: int) -> list[bool]:
        number, a = unlike[rank]
        before = a.copy()
        done = _opened(side, number).begin(a)
        waits = [done(1.0), done(0.01)]
        np.testing.assert_array_equal(a, before)
        return waits

    assert _on_ranks(2, work) == [[False, False]] * 2


def test_a_wait_has_a_deadline_and_can_be_repeated() -> None:
    came = threading.Event()

    def work(side: PrivateGloo, rank: int) -> float:
        line, a = _opened(side, 0), np.ones(600)
        if rank == 1:
            came.wait(SECONDS)
        done = line.begin(a)
        if rank == 0:
            start = time.monotonic()
            assert not done(0.0)
            assert not done(0.12)
            assert 0.1 < time.monotonic() - start < 10.0
            came.set()
        assert done(SECONDS)
        return float(a.sum())

    assert _on_ranks(2, work) == [1200.0, 1200.0]


@pytest.mark.parametrize("failed", [False, True])
def test_after_a_failure_alone_the_group_is_kept_for_ever(failed: bool) -> None:
    """Gloo would wait for the message under way, and the process could not end."""
    references = []

    def work(side: PrivateGloo, rank: int) -> None:
        done = _opened(side, 0).begin(np.ones(1))
        assert done(SECONDS)
        group = side._group
        before = sys.getrefcount(group)
        side.close(failed=failed)
        assert side._group is None
        references.append(sys.getrefcount(group) - before)

    _on_ranks(2, work)
    assert references == [failed - 1] * 2  # that of `side` is gone


def test_numbers_that_gloo_does_not_sum_are_refused() -> None:
    def work(side: PrivateGloo, rank: int) -> None:
        done = _opened(side, 0).begin(np.array([0.5], np.longdouble))
        with pytest.raises(TypeError, match=r"Cannot cast array data from dtype..float128"):
            done(SECONDS)

    _on_ranks(2, work)


def test_a_connection_that_fails_is_an_error() -> None:
    side = PrivateGloo(dist.HashStore(), 2, 2)  # a rank that cannot be
    with pytest.raises(RuntimeError, match="no connection over gloo: "):
        _opened(side, 0)
