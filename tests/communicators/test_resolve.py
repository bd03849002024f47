"""Groups of ranks, and the layers with them, without a launcher."""

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn import CommunicatorLike, Group, SingleProcess, as_communicator, torch_backend
from multibn.communicators import resolve
from multibn.torch_backend import (
    NaiveSyncBatchNorm2d,
    SyncBatchNorm,
    convert_sync_batchnorm,
    get_norm,
    revert_sync_batchnorm,
)
from tests.helpers.ranks import ThreadCommunicator, run_ranks

NEEDS = "torch"


@pytest.fixture(autouse=True)
def _forget_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_resolved", {})
    monkeypatch.setattr(resolve.world(), "resolved", {})


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Where each rank, a thread, says on which machine it is."""
    here = threading.local()
    monkeypatch.setattr(resolve, "this_machine", lambda: here.name)
    return here


def test_groups_of_others_outlive_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one rank alone may have made anew: the others would not come to a second split."""

    def work(communicator: ThreadCommunicator) -> None:
        group = Group(communicator, 2)
        assert group.size == 2
        if communicator.rank == 0:
            monkeypatch.setattr(resolve, "default_group", lambda: SingleProcess)
            assert group.size == 2

    run_ranks(4, work)


class Untouchable:
    """A communicator that nobody may use."""

    allreduce = split = None

    @property
    def rank(self) -> int:
        raise AssertionError

    size = rank


def test_machines_may_have_ranks_of_any_placement(machines: threading.local) -> None:
    names = ["b", "a", "b", "b", "a", "c"]

    def work(world: ThreadCommunicator) -> tuple[int, int, float]:
        machines.name = names[world.rank]
        machine = Group(world, "machine")
        return machine.rank, machine.size, machine.allreduce(np.array([10.0**world.rank]))[0]

    b, a, c = 1101, 10010, 100000
    assert run_ranks(6, work) == [
        (0, 3, b), (0, 2, a), (1, 3, b), (2, 3, b), (1, 2, a), (0, 1, c)
    ]  # fmt: skip


def test_consecutive_ranks_are_counted_inside_a_machine(machines: threading.local) -> None:
    def work(world: ThreadCommunicator) -> float:
        machines.name = "even" if world.rank % 2 == 0 else "odd"
        pairs = Group(Group(world, "machine"), 2)
        total: float = pairs.allreduce(np.array([10.0**world.rank]))[0]
        return total

    low, high = (101, 1010), (1010000, 10100000)
    assert run_ranks(8, work) == [*low, *low, *high, *high]


def test_a_machine_that_the_number_does_not_divide_is_named(machines: threading.local) -> None:
    """The error is on the ranks of that machine, with both numbers and a way out."""

    def work(world: ThreadCommunicator) -> str:
        machines.name = "small" if world.rank < 2 else "large"
        try:
            return str(Group(Group(world, "machine"), 3).size)
        except ValueError as error:
            return str(error)

    small, _, *large = run_ranks(5, work)
    assert "the number of ranks must be divisible by the group size 3: got 2 in" in small
    assert small.endswith(
        "'machine'), on its rank 0. Use one of [1, 2], in `process_group`, `num_sync_devices` or "
        "cfg.BN.NUM_SYNC_DEVICES."
    )
    assert large == ["3", "3", "3"]


def test_a_word_or_a_number_names_a_group() -> None:
    cases: list[tuple[CommunicatorLike, str]] = [
        ("machine", "Group(DefaultCommunicator(), 'machine')"),
        (3, "Group(DefaultCommunicator(), 3)"),
        (Group(SingleProcess(), 1), "Group(SingleProcess(), 1)"),
    ]
    for obj, text in cases:
        assert repr(as_communicator(obj)) == text
    assert as_communicator("machine").size == as_communicator(1).size == 1


def test_what_names_no_group_is_refused() -> None:
    of_lists = (
        r" For a list of ranks, pass torch\.distributed\.new_group\(ranks\), or with mpi4py "
        r"comm\.Create_group\(comm\.group\.Incl\(ranks\)\)\.$"
    )
    cases: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "1 or more consecutive ranks: got 0. Pass 'machine' for the ranks on the"),
        (-2, ValueError, "1 or more consecutive ranks: got -2"),
        ([0, 1], TypeError, rf"a communicator must be None.*got \[0, 1\] of type list\.{of_lists}"),
        ((0, 1), TypeError, rf"a communicator must .*got \(0, 1\) of type tuple\.{of_lists}"),
        (True, TypeError, "a communicator must be None.*got True of type bool"),
        (torch.ones(2), TypeError, r"None, a torch ProcessGroup or DeviceMesh, .*Tensor"),
        ("nccl", TypeError, "'machine' or a number of consecutive ranks: got 'nccl'"),
    ]
    for obj, kind, message in cases:
        with pytest.raises(kind, match=message):
            as_communicator(obj)
    with pytest.raises(TypeError, match=rf"a group must be 'machine'.*got \[0\].*{of_lists}"):
        Group(None, [0])
    with pytest.raises(TypeError, match=r"a group must be 'machine'.*got True of type bool"):
        Group(None, True)
    with pytest.raises(TypeError, match=r"a group must be 'machine'.*got 'node' of type str"):
        Group(None, "node")
    with pytest.raises(TypeError, match="a communicator must be None"):
        Group("gloo", 2)  # type: ignore[arg-type]


def test_nothing_is_looked_up_before_the_first_use() -> None:
    group = Group(Group(SingleProcess(), "machine"), 2)
    group.parent.parent = Untouchable()  # type: ignore[attr-defined]
    layer = SyncBatchNorm(3, process_group=group)
    assert as_communicator(group) is group
    assert copy.deepcopy(layer).process_group is group
    assert "process_group=Group(Group(" in repr(layer)
    layer.eval()(torch.randn(2, 3))


def test_pickles_record_parent_and_spec() -> None:
    for spec in ("machine", 1):
        group = pickle.loads(pickle.dumps(Group(Group(None, "machine"), spec)))
        assert repr(group) == repr(Group(Group(None, "machine"), spec))
        assert (group.rank, group.size, group.allreduce(np.ones(1))[0]) == (0, 1, 1)


@pytest.mark.parametrize("ndim, want", [(1, "2D or 3D"), (2, "4D"), (3, "5D")])
def test_a_naive_layer_is_the_batch_norm_of_its_dimensions(ndim: int, want: str) -> None:
    """It refuses inputs of others, and reverts to torch's class."""
    cls: Any = getattr(torch_backend, f"NaiveSyncBatchNorm{ndim}d")
    layer, original = (
        cls(num_features=4, eps=0.1, momentum=None),
        getattr(nn, f"BatchNorm{ndim}d"),
    )
    for training in (True, False):
        with pytest.raises(ValueError, match=f"^expected {want} input"):
            layer.train(training)(torch.randn(6, 4, *[2] * (ndim % 3 + 1)))
    model = nn.Sequential(layer, nn.ReLU())
    assert convert_sync_batchnorm(model)[0] is layer
    plain: Any = revert_sync_batchnorm(model)[0]
    assert type(plain) is original
    assert plain.weight is layer.weight
    assert (plain.eps, plain.momentum) == (0.1, None)
    assert vars(plain).keys() == vars(original(4)).keys()


def test_options_choose_the_group_of_a_layer() -> None:
    machine = "Group(DefaultCommunicator(), 'machine')"
    for options, text in (
        ({}, "DefaultCommunicator()"),
        ({"num_sync_devices": None}, "DefaultCommunicator()"),
        ({"global_sync": False}, machine),
        ({"num_sync_devices": None, "global_sync": False}, machine),
        ({"num_sync_devices": 0}, machine),
        ({"num_sync_devices": -1}, machine),
        ({"num_sync_devices": 4}, f"Group({machine}, 4)"),
        ({"global_sync": True}, "DefaultCommunicator()"),
        ({"global_sync": True, "num_sync_devices": 4}, "DefaultCommunicator()"),
        ({"process_group": SingleProcess()}, "SingleProcess()"),
        (
            {"num_sync_devices": 0, "process_group": SingleProcess()},
            "Group(SingleProcess(), 'machine')",
        ),
    ):
        layer = NaiveSyncBatchNorm2d(num_features=3, **options)
        assert repr(layer.layer_communicator.communicator) == text
        assert layer.global_sync == (machine not in text and "'machine'" not in text)
    layer = NaiveSyncBatchNorm2d(0, num_features=3)
    assert (layer.num_sync_devices, layer.num_groups) == (1, 1)
    for wrong in ("4", 2.0, True):
        with pytest.raises(TypeError, match=f"`num_sync_devices` must be an int, .* got {wrong!r}"):
            NaiveSyncBatchNorm2d(wrong, num_features=3)  # type: ignore[arg-type]


def test_get_norm_chooses_the_group_of_a_layer() -> None:
    machine = "Group(DefaultCommunicator(), 'machine')"
    for norm_type, options, text in (
        ("sync_batchnorm", {}, f"Group({machine}, 1)"),
        ("sync_batchnorm", {"NUM_SYNC_DEVICES": 0}, machine),
        ("sync_batchnorm", {"NUM_SYNC_DEVICES": 1, "GLOBAL_SYNC": True}, "DefaultCommunicator()"),
        ("sync_batchnorm_apex", {"NUM_SYNC_DEVICES": 1}, "Group(DefaultCommunicator(), 1)"),
        ("sync_batchnorm_apex", {"NUM_SYNC_DEVICES": 0}, "DefaultCommunicator()"),
    ):
        layer: Any = get_norm({"BN": {"NORM_TYPE": norm_type, **options}})(num_features=3)
        assert repr(layer.layer_communicator.communicator) == text


def test_one_process_evaluates_what_needs_more_to_train() -> None:
    layer = pickle.loads(pickle.dumps(NaiveSyncBatchNorm2d(8, num_features=3)))
    x = torch.randn(2, 3, 4, 4)
    assert layer.eval()(x).shape == x.shape
    message = r"divisible by the group size 8: got 1 in .*Use one of \[1\], in"
    with pytest.raises(ValueError, match=message):
        layer.train()(x)
    layer.process_group = None
    layer(x)
