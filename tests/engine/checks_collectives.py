"""What a step of a layer puts on the wire, whatever the number of ranks."""

import numpy as np
import torch

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator

import chainer  # isort: skip (multibn makes it importable)

RUNS = on("torchrun mpiexec", 2, 8, needs="torch chainer")


C = 7
STEPS = 3
EXPECTED = [[2 * C + 4], [2 * C + 4]] * STEPS


def check_a_layer_sends_one_message_each_way(world: Communicator) -> None:
    counting = CountingCommunicator(world)
    layer = SyncBatchNorm(C, process_group=counting)
    untracked = SyncBatchNorm(C, track_running_stats=False, process_group=counting)
    x = torch.randn(2, C, 3, 3, requires_grad=True)
    seen = []
    for _ in range(STEPS):
        y = layer(x)
        seen.append(counting.take())
        y.sum().backward()
        seen.append(counting.take())
    layer.eval()(x).sum().backward()
    untracked.eval()(x).sum().backward()
    assert seen == EXPECTED
    assert counting.take() == []
    # They compare layers: 3 facts, and the squares of their fingerprints.
    assert counting.first_messages == [6]


def check_a_layer_on_the_data_itself_sends_nothing_backward(world: Communicator) -> None:
    """A layer on the data itself needs no collective backward."""
    counting = CountingCommunicator(world)
    layer = SyncBatchNorm(C, process_group=counting)
    layer(torch.randn(2, C)).sum().backward()
    assert counting.take() == [2 * C + 4]


def check_a_link_sends_one_message_each_way(world: Communicator) -> None:
    counting = CountingCommunicator(world)
    link = MultiNodeBatchNormalization(C, counting)
    x = chainer.Variable(np.random.default_rng(0).normal(size=(2, C, 3, 3)).astype("float32"))
    seen = []
    for _ in range(STEPS):
        y = link(x)
        seen.append(counting.take())
        y.grad = np.ones_like(y.array)
        y.backward()
        seen.append(counting.take())
    with chainer.using_config("train", False):
        link(x)
    assert seen == EXPECTED
    assert counting.take() == []
    # They compare layers: 3 facts, and the squares of their fingerprints.
    assert counting.first_messages == [6]
