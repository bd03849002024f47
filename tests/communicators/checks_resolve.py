"""Statistics shared in groups of ranks, against the oracle of each group."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from multibn import Group, as_communicator
from multibn.communicators import Communicator, resolve
from multibn.torch_backend import NaiveSyncBatchNorm2d, SyncBatchNorm
from tests.communicators import conformance
from tests.harness.runs import on, only
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")

C = 3


def _pair(world: Communicator) -> int:
    """Ranks in a group: 2, so that 4 ranks make 2 groups."""
    return min(2, world.size)


def _mates(world: Communicator, k: int) -> range:
    """The ranks in this one's group of `k` consecutive ones."""
    first = world.rank // k * k
    return range(first, first + k)


@contextmanager
def machines(world: Communicator, ranks_in_each: int) -> Iterator[None]:
    """Let the ranks be on machines with so many ranks each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "this_machine", lambda: f"machine {world.rank // ranks_in_each}")
        patch.setattr(resolve, "_resolved", {})
        patch.setattr(resolve.world(), "resolved", {})
        yield


def _members(world: Communicator, group: Communicator) -> list[int]:
    """The world's ranks in a group, in its order. Collective over the group."""
    table = np.zeros(group.size, dtype=np.int64)
    table[group.rank] = world.rank
    return group.allreduce(table).tolist()


def check_groups_conform(world: Communicator) -> None:
    k = _pair(world)
    for group in (
        Group(world, "machine"),
        Group(world, k),
        Group(world, 1),
        Group(Group(world, "machine"), k),
    ):
        conformance.check_communicator(group)


@only("torchrun")
def check_a_spec_or_a_dimension_of_a_mesh_is_a_group(world: Communicator) -> None:
    k, everyone = _pair(world), list(range(world.size))
    found = [_members(world, as_communicator(obj)) for obj in ("machine", k)]
    mesh = dist.init_device_mesh("cpu", (world.size // k, k), mesh_dim_names=("dp", "mp"))
    of_mesh = [_members(world, as_communicator(mesh[name])) for name in ("dp", "mp")]
    mates = list(_mates(world, k))
    assert found == [everyone, mates]
    assert of_mesh == [everyone[world.rank % k :: k], mates]


def check_layers_of_equal_groups_share_one_communicator(world: Communicator) -> None:
    """The groups of 20 layers, of equal parent and spec, are found once."""
    counting = CountingGroups(world)
    k = _pair(world)
    with machines(world, k):
        layers = [
            NaiveSyncBatchNorm2d(k, num_features=C, process_group=counting) for _ in range(20)
        ]
        x = _tensor((world.rank, 0), (2, C, 3, 3)).float().requires_grad_()
        y = x
        for layer in layers:
            y = layer(y)
        forward = counting.take()
        y.sum().backward()
        backward = counting.take()
        for layer in layers:
            layer.eval()(x)
    alone = world.size == 1
    names = world.size * len('"machine 0"')
    assert forward == ([] if alone else [world.size, names, *[2 * C + 4] * 20])
    assert backward == ([] if alone else [2 * C + 2] * 20)
    assert counting.take() == []
    assert counting.num_splits == (k < world.size)  # one machine is no reason to split


@only("torchrun", sizes=(2,))
def check_a_group_of_a_process_group_made_anew_is_new(world: Communicator) -> None:
    for _ in range(2):
        of_torch = dist.new_group([0, 1])
        for spec in ("machine", 2):  # each is all of the parent
            assert Group(of_torch, spec).allreduce(np.ones(1)) == 2
        dist.destroy_process_group(of_torch)


@only("torchrun", last=True)
def check_layers_go_on_in_a_process_group_made_anew(world: Communicator) -> None:
    """The check exchanges the default process group under the world."""
    k, rank, size = _pair(world), world.rank, world.size
    layer = NaiveSyncBatchNorm2d(k, num_features=C)
    x = _tensor((world.rank, 7), (2, C, 4, 4)).float()
    results = [layer(x)]
    members, expected = [_members(world, layer.layer_communicator)], [list(_mates(world, k))]
    unused, of_world = SyncBatchNorm(3), Group(dist.group.WORLD, k)
    assert of_world.allreduce(np.ones(1)) == k
    for number in (size - 1 - rank, rank):  # the ranks in reverse, and as they were
        dist.destroy_process_group()
        after = SyncBatchNorm(3)
        # The launcher's store still has the addresses of earlier groups: under another prefix.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(f"{len(results)}", dist.TCPStore(*address, is_master=False))
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        results.append(layer(x))
        members.append(_members(world, layer.layer_communicator))
        assert of_world.allreduce(np.ones(1)) == k
        expected.append(list(_mates(world, k)))
    assert members == expected
    for again in results[1:]:
        torch.testing.assert_close(results[0], again)
    for built_earlier in (unused, after):
        built_earlier(torch.full((2, 3), float(rank)))
        mean = torch.full((3,), 0.1 * (size - 1) / 2)
        torch.testing.assert_close(built_earlier.running_mean, mean)


class CountingGroups(CountingCommunicator):
    """Counts what its groups send too, and how often it is split."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.num_splits = 0

    def split(self, color: int, key: int = 0) -> Communicator:
        self.num_splits += 1
        part = CountingCommunicator(self.inner.split(color, key))
        part.messages = self.messages
        return part

    def take(self) -> list[int]:
        taken = list(self.messages)
        self.messages.clear()  # the groups go on writing to it
        return taken


def _tensor(seed: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(1, 2, shape))
