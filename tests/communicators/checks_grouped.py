"""Statistics shared in groups of ranks, against the oracle of each group."""

import copy
import io
import os
import pickle
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from multibn import Group, as_communicator
from multibn.communicators import Communicator, groups, lookup
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.parity import oracle
from multibn.parity.oracle import relative_error
from multibn.torch_backend import (
    NaiveSyncBatchNorm1d,
    NaiveSyncBatchNorm2d,
    NaiveSyncBatchNorm3d,
    SyncBatchNorm,
    get_norm,
)
from tests.communicators import conformance
from tests.communicators.checks_communicators import fresh
from tests.harness.runs import on, only
from tests.helpers import launch
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")


C = 3
EPS = 1e-5
MOMENTUM = 0.2
NAIVE: dict[str, Any] = {"weighting": "rank", "running_var": "biased"}
LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (NaiveSyncBatchNorm1d, ()),
    (NaiveSyncBatchNorm1d, (5,)),
    (NaiveSyncBatchNorm2d, (4, 3)),
    (NaiveSyncBatchNorm3d, (2, 3, 4)),
]


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
        patch.setattr(groups, "this_machine", lambda: f"machine {world.rank // ranks_in_each}")
        patch.setattr(lookup, "_resolved", {})
        yield


def _members(world: Communicator, group: Communicator) -> list[int]:
    """The world's ranks in a group, in its order. Collective over the group."""
    table = np.zeros(group.size, dtype=np.int64)
    table[group.rank] = world.rank
    return group.allreduce(table).tolist()


# Which ranks are in a group


def check_groups_conform(world: Communicator) -> None:
    k = _pair(world)
    for group in (
        Group(world, "machine"),
        Group(world, k),
        Group(world, 1),
        Group(world, list(reversed(range(world.size)))),
        Group(Group(world, "machine"), k),
    ):
        conformance.check_communicator(group)


def check_a_group_has_the_ranks_that_its_spec_names(world: Communicator) -> None:
    k, everyone = _pair(world), list(range(world.size))
    mates = list(_mates(world, k))
    with machines(world, k):
        found = [
            _members(world, group)
            for group in (
                Group(world, "machine"),
                Group(world, k),
                Group(world, everyone),
                Group(world, tuple(reversed(everyone))),
                Group(world, mates),  # lists that partition the ranks
                Group(Group(world, "machine"), 1),
                Group(Group(world, "machine"), k),
            )
        ]
    expected = [mates, mates, everyone, everyone[::-1], mates, [world.rank], mates]
    here = _members(world, Group(world, "machine"))  # all ranks of a test are on one machine
    assert found == expected
    assert here == everyone


@only(sizes=(4,))
def check_lists_are_known_on_all_ranks(world: Communicator) -> None:
    """After own lists, a list of some ranks is known on the others, too, which do not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_resolved", {})
        mine = list(_mates(world, 2))
        members = _members(world, Group(world, mine))
        first = Group(world, [0, 1])
        if world.rank < 2:
            assert _members(world, first) == [0, 1]
        else:
            with pytest.raises(ValueError, match="is not in the list of ranks: got Group"):
                assert first.size
        # Rank 0's list names rank 1, whose list does not name rank 0.
        own = [0, 1] if world.rank == 0 else [1, 2] if world.rank in (1, 2) else [3]
        message = r"all ranks of a list must pass this list: .* of rank\(s\) \[0\] of "
        patch.setattr(lookup, "_resolved", {})
        with pytest.raises(ValueError, match=message):
            assert Group(world, own).size
    assert members == mine


@only("torchrun")
def check_a_spec_alone_groups_the_default_communicator(world: Communicator) -> None:
    k, everyone = _pair(world), list(range(world.size))
    found = [_members(world, as_communicator(obj)) for obj in ("machine", k, everyone[::-1])]
    assert found == [everyone, list(_mates(world, k)), everyone[::-1]]


@only("torchrun")
def check_a_dimension_of_a_mesh_is_a_group(world: Communicator) -> None:
    """Named, of a mesh with two: the statistics are those of the column's, or row's, batch."""
    import torch.distributed as dist

    k = _pair(world)
    mesh = dist.init_device_mesh("cpu", (world.size // k, k), mesh_dim_names=("dp", "mp"))
    dp = list(range(world.rank % k, world.size, k))
    for name, members in (("dp", dp), ("mp", list(_mates(world, k)))):
        layer = SyncBatchNorm(C, momentum=1.0, process_group=mesh[name], dtype=torch.float64)
        xs = [_array((r, 0), (2 + r, C, 4)) for r in range(world.size)]
        layer(torch.from_numpy(xs[world.rank]))
        assert layer.running_mean is not None
        expected = np.concatenate([xs[r] for r in members]).mean((0, 2))
        np.testing.assert_allclose(layer.running_mean, expected, rtol=1e-12)
        assert _members(world, layer.process_group) == members


def check_layers_of_equal_groups_share_one_communicator(world: Communicator) -> None:
    """Of equal parent and spec: the groups of 20 layers are found once."""
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
    assert forward == ([] if alone else [world.size, *[2 * C + 4] * 20])
    assert backward == ([] if alone else [2 * C + 4] * 20)
    assert counting.take() == []
    assert counting.num_splits == (k < world.size)  # one machine is no reason to split


def check_a_step_sends_one_message_each_way(world: Communicator) -> None:
    counting = CountingGroups(world)
    layer = NaiveSyncBatchNorm2d(0, num_features=C, process_group=counting)
    x = _tensor((world.rank, 0), (2, C, 3, 3)).float().requires_grad_()
    seen = []
    for _ in range(3):
        y = layer(x)
        seen.append(counting.take())
        y.sum().backward()
        seen.append(counting.take())
    table = [world.size] * (world.size > 1)  # who is on which machine, in the first step
    # A rank alone has nobody to send a message to.
    step = [[2 * C + 4], [2 * C + 4]] if world.size > 1 else [[], []]
    assert seen == [[*table, *step[0]], step[1], *step * 2]


# The numbers


def check_a_group_gives_the_numbers_of_its_formula(world: Communicator) -> None:
    """By default those of one process on the group's batch; with NAIVE those of the originals."""
    for layer_class, spatial in LAYERS:
        for dtype in (np.float64, np.float32):
            for options in ({}, NAIVE):
                for name, error in _errors(world, layer_class, spatial, dtype, options).items():
                    if options:
                        bound = 1e-12 if dtype is np.float64 else 1e-6
                    else:
                        bound = 1e-11 if dtype is np.float64 else 1e-6 if name == "y" else 1e-5
                    assert error < bound, (layer_class, name, error)


def check_global_sync_shares_over_all_machines(world: Communicator) -> None:
    """All ranks of all machines; `num_sync_devices` is not read."""
    with machines(world, 1):
        for formula in ({}, NAIVE):
            options = {"num_sync_devices": 1, "global_sync": True, **formula}
            errors = _errors(world, *LAYERS[2], np.float64, options, world.size)
            assert all(error < 1e-11 for error in errors.values()), errors


def check_the_conventions_differ(world: Communicator) -> None:
    """The negative control: uneven batches tell the naive formula from the exact statistics."""
    errors = _errors(world, *LAYERS[2], np.float64, {}, formula=NAIVE)
    assert errors["running_var"] > 1e-3, errors
    assert world.size == 1 or errors["y"] > 1e-3, errors


def check_layers_train_without_parameters_or_buffers(world: Communicator) -> None:
    """affine=False and track_running_stats=False, where the originals crash."""
    k = _pair(world)
    full = NaiveSyncBatchNorm3d(k, num_features=C, process_group=world, **NAIVE)
    x = _tensor((world.rank, 1), (2 + world.rank, C, 2, 3, 4)).float()
    expected = full(x)
    cases: list[dict[str, Any]] = [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"bias": False},
        {"momentum": None},
    ]
    for options in cases:
        layer: Any = NaiveSyncBatchNorm3d(
            k, num_features=C, process_group=world, **NAIVE, **options
        )
        t = x.clone().requires_grad_()
        y = layer(t)
        y.square().sum().backward()
        torch.testing.assert_close(y, expected)
        assert t.grad is not None
        if options.get("track_running_stats", True):
            assert int(layer.num_batches_tracked) == 1
        else:
            assert layer.running_mean is None


def check_an_empty_rank_takes_part(world: Communicator) -> None:
    """The originals refuse it."""
    k = _pair(world)
    for conventions in ({}, NAIVE):
        layer: Any = NaiveSyncBatchNorm2d(
            k, num_features=C, process_group=world, momentum=1.0, dtype=torch.float64, **conventions
        )
        xs = [_tensor((r, 2), (0 if r % 2 else 3, C, 2, 2)) for r in range(world.size)]
        layer(xs[world.rank]).sum().backward()
        expected = xs[world.rank // k * k].mean((0, 2, 3))  # of a pair, the even rank has data
        torch.testing.assert_close(layer.running_mean, expected)


# Layers with groups, from the making to the loading


def check_copies_and_pickles_find_the_same_group(world: Communicator) -> None:
    """Before and after the group is found, and in this same world."""
    k = _pair(world)
    x = _tensor((world.rank, 3), (2, C, 4, 4)).float()
    layer = NaiveSyncBatchNorm2d(k, num_features=C, process_group=world)
    early = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    state = io.BytesIO()
    expected = layer(x)
    torch.save(layer, state)
    state.seek(0)
    late = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    late.append(torch.load(state, weights_only=False))
    for other in (*early, *late):
        torch.testing.assert_close(other(x), expected)
        assert _members(world, other.process_group) == list(_mates(world, k))
    assert copy.deepcopy(layer).process_group is layer.process_group
    ema: Any = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer))
    assert ema.module[0].process_group is layer.process_group


def check_a_saved_model_evaluates_in_one_process(world: Communicator) -> None:
    """What many ranks saved evaluates in a process without a group; a machine's also trains."""
    k = _pair(world)
    parent = None if isinstance(world, TorchDistributed) else world
    model = nn.ModuleDict(
        {
            "some": NaiveSyncBatchNorm2d(k, num_features=C, process_group=parent),
            "machine": NaiveSyncBatchNorm2d(0, num_features=C, process_group=parent),
        }
    )
    for layer in model.values():
        layer(_tensor((world.rank, 4), (2, C, 4, 4)).float())
    if world.rank != 0:
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt")
        torch.save(model, path)
        code = (
            "import sys, torch\n"
            f"model = torch.load({str(path)!r}, weights_only=False)\n"
            "x = torch.randn(2, 3, 4, 4)\n"
            "for layer in model.values(): layer.eval()(x)\n"
            "assert 'mpi4py' not in sys.modules\n"
            "model['machine'].train()(x)\n"
            "try: model['some'].train()(x)\n"
            "except ValueError as error: print(error)\n"
        )
        said = launch.printed(
            "-c", code, interpreter=launch.python(), alone=True, PYTHONPATH=str(launch.ROOT)
        )
    if k > 1:
        assert "groups of 2 consecutive ranks need a number of ranks that 2 divides" in said


@only("torchrun")
def check_ddp_trains(world: Communicator) -> None:
    """Parameters stay equal on all ranks, running statistics within a group."""
    k = _pair(world)
    torch.manual_seed(0)
    bn: Any = NaiveSyncBatchNorm2d(k, num_features=4)
    with warnings.catch_warnings():
        # torch 2.13 renames the argument; it is still how all others spell it.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Conv2d(3, 4, 3), bn), broadcast_buffers=False
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(_tensor((world.rank, step), (2, 3, 6, 6)).float()).square().mean().backward()
        optimizer.step()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = world.allreduce(parameters) / world.size
    in_group = bn.process_group.allreduce(bn.running_mean) / k
    everywhere = world.allreduce(bn.running_mean) / world.size
    torch.testing.assert_close(parameters, mean)
    torch.testing.assert_close(bn.running_mean, in_group)
    assert world.size == k or not torch.allclose(bn.running_mean, everywhere)


def check_get_norm_lets_global_sync_win(world: Communicator) -> None:
    """GLOBAL_SYNC wins over NUM_SYNC_DEVICES, which pytorchvideo refuses."""
    x = _tensor((world.rank, 6), (2, C, 2, 3, 4))
    own = x.mean((0, 2, 3, 4))
    over_world = world.allreduce(own) / world.size
    for bn, expected in (
        ({"NORM_TYPE": "sync_batchnorm"}, own),
        ({"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": 0}, over_world),
        ({"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": 1, "GLOBAL_SYNC": True}, over_world),
    ):
        layer: Any = get_norm({"BN": bn})(
            num_features=C, momentum=1.0, dtype=torch.float64, process_group=world
        )
        layer(x)
        torch.testing.assert_close(layer.running_mean, expected)


# Errors


def check_an_indivisible_number_of_ranks_is_refused(world: Communicator) -> None:
    k = world.size + 1
    layer = NaiveSyncBatchNorm2d(k, num_features=C, process_group=world)
    message = (
        rf"groups of {k} consecutive ranks need a number of ranks that {k} divides: got "
        rf"{world.size} in Group\(.*, 'machine'\), on its rank {world.rank}\. Use one of \[1"
    )
    x = torch.ones(2, C, 2, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            layer(x)
    with pytest.raises(ValueError, match=rf"groups of {k} .*: got {world.size} in (MPI|Torch)"):
        Group(world, k).allreduce(x)
    layer.eval()(x)
    layer.train()
    with machines(world, 1), pytest.raises(ValueError, match=f"groups of {k} .*: got 1 in Group"):
        layer(x)


@only(sizes=(2,), last=True)  # the group of these ranks cannot be used after its failure
def check_ranks_in_different_groups_are_named_before_a_deadline(world: Communicator) -> None:
    """One list on both ranks, and then another one on one of them: no deadline is awaited."""
    parent: Any = fresh(world)
    parent.timeout = 10.0
    parent.allreduce(np.ones(1))  # a group that has never met is told at the deadline
    both = Group(parent, [1, 0])
    for _ in range(2):
        both.allreduce(np.ones(1))
    group = both if world.rank == 0 else Group(parent, [1])
    said = ""
    try:
        group.allreduce(np.ones(1))
    except (RuntimeError, TimeoutError) as error:
        said = str(error)
    for communicator in (parent, both.resolve()):
        communicator.lines.abandon()
    world.allreduce(np.ones(1))
    # Ranks are numbered as in the group of the rank that looks first, which tells the other one.
    is_in, waits = (
        r"rank \d is in a sum of .* of shape \({},\), ",
        r"and waits for rank \d ",
    )
    places = [is_in.format(length) for length in (1, 2)]
    for one, other in (places, places[::-1]):
        if re.search(
            f"different places: {one}{waits}of 2; {other}{waits}in another group, of 2", said
        ):
            return
    raise AssertionError(said)


def check_bad_input_on_one_rank_is_an_error_in_its_group(world: Communicator) -> None:
    k = _pair(world)
    layer = NaiveSyncBatchNorm2d(k, num_features=C, process_group=world)
    good, bad = torch.randn(2, C, 3, 3), torch.randn(2, C, 3)
    if world.rank == 0:
        with pytest.raises(ValueError, match=r"must have 4 dimensions, \(N, C, H, W\): got shape"):
            layer(bad)
    elif world.rank in range(k):
        with pytest.raises(RuntimeError, match=rf"refused on rank\(s\) \[0\] of {k}"):
            layer(good)
    else:
        layer(good)
    layer(good)


@only("torchrun", last=True)
def check_layers_go_on_in_a_process_group_made_anew(world: Communicator) -> None:
    """The check exchanges the default process group under the world."""
    import torch.distributed as dist

    k, rank, size = _pair(world), world.rank, world.size
    layer = NaiveSyncBatchNorm2d(k, num_features=C)
    x = _tensor((world.rank, 7), (2, C, 4, 4)).float()
    results = [layer(x)]
    members, expected = [_members(world, layer.process_group)], [list(_mates(world, k))]
    unused = SyncBatchNorm(3)
    for number in (size - 1 - rank, rank):  # the ranks in reverse, and as they were
        dist.destroy_process_group()
        after = SyncBatchNorm(3)
        # The launcher's store still has the addresses of earlier groups: under another prefix.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(f"{len(results)}", dist.TCPStore(*address, is_master=False))
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        results.append(layer(x))
        members.append(_members(world, layer.process_group))
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


def _array(seed: tuple[int, ...], shape: Sequence[int]) -> Any:
    return np.random.default_rng(seed).normal(1, 2, shape)


def _tensor(seed: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(_array(seed, shape))


def _errors(
    world: Communicator,
    layer_class: Any,
    spatial: tuple[int, ...],
    dtype: Any,
    options: dict[str, Any],
    k: int = 0,
    formula: dict[str, Any] | None = None,
) -> dict[str, float]:
    """The largest relative error of each number of three steps, from the oracle of `k` ranks.

    Every rank has another batch size. The parameters' gradients are those of this rank.
    """
    k = k or _pair(world)
    formula = options if formula is None else formula
    weight, bias = _array((100,), (C,)).astype(dtype), _array((101,), (C,)).astype(dtype)
    settings = {"num_sync_devices": k, "eps": EPS, "momentum": MOMENTUM, **options}
    parameters = {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}
    settings["dtype"] = parameters["weight"].dtype
    layer = layer_class(num_features=C, process_group=world, **settings)
    layer.load_state_dict(parameters, strict=False)
    mates, me, errors = _mates(world, k), world.rank % k, defaultdict[str, float](float)
    running: Any = np.zeros(C), np.ones(C)
    for step in range(3):
        shapes = [(3 + 3 * (rank % k) + step, C, *spatial) for rank in range(world.size)]
        xs = [_array((r, step), shapes[r]).astype(dtype) for r in mates]
        dys = [_array((r, step, 1), shapes[r]).astype(dtype) for r in mates]
        x, dy = torch.from_numpy(xs[me]).requires_grad_(), dys[me].astype(np.float64)
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.from_numpy(dys[me]))
        whole, unit = (
            oracle.batch_norm(xs, dys, w, b, eps=EPS, weighting=formula.get("weighting", "element"))
            for w, b in ((weight, bias), (np.ones(C), np.zeros(C)))
        )
        axes = (0, *range(2, dy.ndim))
        factor = 1.0 if "running_var" in formula else whole.count / (whole.count - 1)
        running = oracle.running(running, whole.mean, whole.var, factor, MOMENTUM)
        seen: Any = (
            ("y", y, whole.y[me]),
            ("dx", x.grad, whole.dx[me]),
            ("dweight", layer.weight.grad, (dy * unit.y[me]).sum(axes)),
            ("dbias", layer.bias.grad, dy.sum(axes)),
            ("running_mean", layer.running_mean, running[0]),
            ("running_var", layer.running_var, running[1]),
        )
        for name, got, expected in seen:
            error = relative_error(got.detach().numpy(), expected)
            errors[name] = float(np.maximum(errors[name], error))  # NaN stays NaN
    return errors
