"""What a step of a layer puts on the wire, whatever the number of ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator

import chainer  # isort: skip (multibn makes it importable)

RUNS = on("torchrun mpiexec", 2, 4, needs="torch chainer")


C = 7
SHAPE = (2, C, 3, 3)


def _messages(counting: CountingCommunicator, *parts: Callable[[], Any]) -> list[list[int]]:
    """The sizes of the messages of each part."""
    found = []
    for part in parts:
        part()
        found.append(counting.take())
    return found


def check_a_layer_sends_one_message_each_way(world: Communicator) -> None:
    """And none backward on the data itself, nor in evaluation."""
    counting = CountingCommunicator(world)
    layer = SyncBatchNorm(C, process_group=counting)
    untracked = SyncBatchNorm(C, track_running_stats=False, process_group=counting)
    x, ys = torch.randn(SHAPE, requires_grad=True), []
    step = [lambda: ys.append(layer(x)), lambda: ys[-1].sum().backward()]
    found = _messages(
        counting,
        *step * 3,
        lambda: SyncBatchNorm(C, process_group=counting)(x.detach()).sum().backward(),
        lambda: layer.eval()(x).sum().backward(),
        lambda: untracked.eval()(x).sum().backward(),
    )
    assert found == [[2 * C + 4], [2 * C + 2]] * 3 + [[2 * C + 4], [], []]
    assert counting.first_messages == [3, 3]


def check_a_link_sends_one_message_each_way(world: Communicator) -> None:
    counting = CountingCommunicator(world)
    link = MultiNodeBatchNormalization(C, counting)
    x, ys = chainer.Variable(np.random.default_rng(0).normal(size=SHAPE).astype("f")), []
    step = [lambda: ys.append(link(x)), lambda: chainer.functions.sum(ys[-1]).backward()]
    with chainer.using_config("train", False):
        assert _messages(counting, lambda: link(x)) == [[]]
    assert _messages(counting, *step * 3) == [[2 * C + 4], [2 * C + 2]] * 3
    assert counting.first_messages == [3]
