"""Training on uneven data in torch, and whether ranks agree, on real processes."""

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from multibn import torch_backend as tb
from multibn.communicators import Communicator, Group, SingleProcess
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on
from tests.helpers.ranks import CountingCommunicator
from tests.torch_backend.train.test_join import PLACES

RUNS = on("torchrun mpiexec", 3, needs="torch")

SIZES = [[3, 5, 2], [4, 1, 2, 6], [2, 3]]  # of the batches of each rank, 3 against 4 against 2


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
    ).double()


def _batches(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "x": (rank + torch.randn(n, 3, 4, 4, generator=generator)).double(),
            "target": torch.randint(5, (n,), generator=generator),
        }
        for n in SIZES[rank]
    ]


def _optimizer(model: nn.Module) -> Any:
    # Momentum and decay: a rank without data must not stand still.
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def check_uneven_training_equals_one_process(world: Communicator) -> None:
    """Weights and running statistics, over two epochs, with and without DDP."""
    whole, of_ranks = _network(), [_batches(rank) for rank in range(world.size)]
    of_whole = _optimizer(whole)
    for step in [*range(max(map(len, of_ranks)))] * 2:
        there = [batches[step] for batches in of_ranks if step < len(batches)]
        x, target = (torch.cat([b[name] for b in there]) for name in ("x", "target"))
        of_whole.zero_grad()
        F.cross_entropy(whole(x), target).backward()
        of_whole.step()
    expected = whole.state_dict()
    ways = ["average_gradients"] + ["ddp"] * isinstance(world, TorchDistributed)
    for way in ways:
        inner = tb.convert_sync_batchnorm(_network(), world)
        model = DistributedDataParallel(inner) if way == "ddp" else inner
        optimizer = _optimizer(model)
        num_steps = 0
        with tb.join(model) as joined:
            for _ in range(2):
                for batch in joined(_batches(world.rank)):
                    optimizer.zero_grad()
                    losses = F.cross_entropy(model(batch["x"]), batch["target"], reduction="none")
                    joined.mean(losses).backward()
                    if way != "ddp":
                        tb.average_gradients(model.parameters(), world)
                    optimizer.step()
                    num_steps += 1
        assert num_steps == 2 * max(map(len, SIZES[: world.size]))
        expect_in_sync(inner, world)
        for name, value in inner.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def check_arrays_of_any_kind_are_compared_or_named(world: Communicator) -> None:
    turned, eye = torch.tensor([1j, 2]).conj(), torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a format in beta state
        others = eye.to_sparse(), eye.to_sparse_csr()
    model: Any = nn.Module()
    for right in (turned, turned.imag, *others, eye[:0]):
        model.register_buffer("b", right)
        expect_in_sync(model, world)
    model.register_buffer("b", (world.rank * eye).to_sparse())
    with pytest.raises(RuntimeError, match=r"1 of 1 arrays .* b by up to 1 on rank 1"):
        expect_in_sync(model, world)
    of_others = pytest.raises(RuntimeError, match=r"cannot be compared on rank\(s\) \[1\] of 3\. S")
    for wrong in (torch.ones(2, device="meta"), torch.ones((), device="meta")):
        model.register_buffer("b", wrong if world.rank == 1 else eye)
        own = pytest.raises(
            TypeError, match=r"`b`, a Tensor, cannot be .*\. Leave it out: `ignore='"
        )
        with own if world.rank == 1 else of_others:
            expect_in_sync(model, world)
    for ignore in (3, [3]):
        patterns: Any = ignore
        with pytest.raises(TypeError, match=r"`ignore` must be a pattern of names, or several: g"):
            expect_in_sync(model, world, ignore=patterns)
    named: Any = nn.Linear(1, 1).named_parameters()
    with pytest.raises(TypeError, match=r"`parameters` must be tensors: got tuple\. Pass the mod"):
        tb.average_gradients(named, world)


def check_a_function_on_some_ranks_and_a_layer_on_others_are_told(world: Communicator) -> None:
    model = tb.SyncBatchNorm(3, process_group=world)
    for place, function in PLACES.items():
        model(torch.ones(2, 3) + world.rank)
        with pytest.raises(RuntimeError, match="the ranks are in different places") as raised:
            function(model, world) if world.rank else model(torch.ones(2, 3))
        assert f"; rank(s) [1, 2] in {place} (a sum of float64 numbers of" in str(raised.value)


def _loop(data: Any, world: Communicator, *, break_off: bool = False) -> int:
    num_steps = 0
    with tb.join(nn.Flatten(), world) as joined:
        for _ in joined(data):
            num_steps += 1
            if break_off:
                break
    return num_steps


def check_breaking_off_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    """It is no error where nobody has a batch left, or where all ranks break off."""
    culprit = world.size - 1
    guilty = world.rank == culprit
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=rf"rank\(s\) \[{culprit}\] of {world.size} left the"):
        _loop([x] * 3, world, break_off=guilty)
    assert _loop([x] * 3, world, break_off=True) == 1
    assert _loop([x], world, break_off=guilty) == 1


def check_a_group_given_to_all_layers_is_that_of_the_functions(world: Communicator) -> None:
    """Ranks with models of their own, then ranks 1 and 2 together, then all, as README does."""
    pair = world.split(world.rank == 0)
    x = torch.full((2, 1), float(world.rank))
    for group in (SingleProcess(), Group(SingleProcess(), "machine"), pair, world):
        model: Any = tb.convert_sync_batchnorm(
            nn.Sequential(nn.BatchNorm1d(1, momentum=1.0)), group
        )
        model = copy.deepcopy(model)
        norm, ranks = model[0], [[world.rank], [1, 2], [0, 1, 2]][group.size - 1]
        mean = sum(ranks) / len(ranks)
        norm.running_mean.fill_(world.rank)
        if group is world:
            with pytest.raises(RuntimeError, match=r"1 of 5 .* 0\.running_mean by up to 1 on rank"):
                expect_in_sync(model)
        tb.sync_running_stats(model, how="pool")
        assert norm.running_mean.item() == mean
        tb.update_bn_stats(model, [x], progress=False)
        assert norm.running_mean.item() == mean
        norm.weight.grad = x[0].clone()
        tb.average_gradients(model)
        assert norm.weight.grad.item() == mean
        expect_in_sync(model)
        with tb.join(model) as joined:
            assert joined.communicator.size == len(ranks)
    if world.rank:
        alone = tb.convert_sync_batchnorm(nn.BatchNorm1d(1), SingleProcess())
        shared = tb.convert_sync_batchnorm(nn.BatchNorm1d(1), pair)
        unlike = (
            r"different groups: SingleProcess\(\) in 0; .* in 1\. Pass the group of all ranks that"
        )
        with pytest.raises(ValueError, match=unlike):
            expect_in_sync(nn.Sequential(alone, shared))


def check_ghost_norms_are_layers_of_a_model_that_all_ranks_train(world: Communicator) -> None:
    """A copy and a pickle, too. SingleProcess() that was given to such a layer is a choice."""
    ghosts = [tb.SubBatchNorm1d(2, 1), tb.convert_sub_batchnorm(nn.BatchNorm1d(1), 2)]
    group = None if isinstance(world, TorchDistributed) else world
    for ghost in [pickle.loads(pickle.dumps(copy.deepcopy(layer))) for layer in ghosts]:
        for rest in (nn.Identity(), tb.convert_sync_batchnorm(nn.BatchNorm1d(1), group)):
            if group is None or not isinstance(rest, nn.Identity):
                assert tb.join(nn.Sequential(ghost, rest)).communicator.size == world.size
    assert tb.join(tb.SubBatchNorm1d(2, 1, process_group=SingleProcess())).communicator.size == 1


def check_gradients_of_a_parameter_or_an_iterator_may_be_sparse(world: Communicator) -> None:
    weight = nn.Parameter(torch.zeros(1))
    for given in (weight, used_up := iter([weight])):
        weight.grad = torch.full((1,), float(world.rank)).to_sparse()
        tb.average_gradients(given, world)
        assert weight.grad.tolist() == [(world.size - 1) / 2]
    with pytest.raises(ValueError, match="`parameters` must have a parameter left: got an exh"):
        tb.average_gradients(used_up, world)


def check_no_helper_takes_one_rank_for_all(world: Communicator) -> None:
    """A model without synchronized layers tells of no other rank; torch's default group does."""
    model: Any = nn.BatchNorm1d(1)
    model.weight.grad = torch.full((1,), float(world.rank))
    x = torch.full((2, 1), float(world.rank))
    helpers: list[Callable[[], object]] = [
        lambda: expect_in_sync(model),
        lambda: tb.sync_running_stats(model),
        lambda: tb.update_bn_stats(model, [x], progress=False),
        lambda: tb.average_gradients(model),
        lambda: tb.average_gradients(model.parameters()),
        lambda: tb.join(model).__enter__(),
    ]
    message = (
        r"`process_group` must say which ranks take part: got None, but the launcher "
        rf"started {world.size} processes \(OMPI_COMM_WORLD_SIZE={world.size}\), the model has "
        "no layer with a group, .* Pass a communicator, .* alone, pass multibn.SingleProcess"
    )
    knows = isinstance(world, TorchDistributed)
    for helper in helpers[: 5 if knows else 6]:
        with nullcontext() if knows else pytest.raises(ValueError, match=message):
            helper()
    if knows:
        assert float(model.running_mean) == model.weight.grad.item() == (world.size - 1) / 2


def check_differences_of_models_are_found(world: Communicator) -> None:
    """They are found by the names of the state, and none in layers that have no shape yet."""
    model = tb.convert_sync_batchnorm(_network(), world)
    model.append(nn.BatchNorm1d(5, dtype=torch.bfloat16)).append(nn.LazyLinear(2))
    counting = CountingCommunicator(world)
    expect_in_sync(model, counting)
    assert len(counting.take()) == 3
    culprit = world.size - 1
    if world.rank == culprit:
        model[2].running_mean[1] += 2**-5
    with pytest.raises(RuntimeError, match=rf"2\.running_mean by up to 0.0312 on rank {culprit}\."):
        expect_in_sync(model, counting)
    expect_in_sync(model, world, ignore=["*.running_mean"])
    # Bits that no difference shows, and NaN, are found too.
    with torch.no_grad():
        model[2].running_mean.zero_()
        model[2].running_mean *= -1 if world.rank == culprit else 1
        model[1].bias[0] = torch.nan if world.rank == 0 else 0
    found = (
        rf"2 of 21 .*1\.bias by up to nan on rank 1.*2\.running_mean on rank\(s\) \[{culprit}\]\."
    )
    with pytest.raises(RuntimeError, match=found):
        expect_in_sync(model, world)
    if world.rank == 1:
        del model[0].num_batches_tracked
        model[2].eps = 1e-3
    message = (
        r"the same on all .*rank 1 has 2 with eps=0\.001, lacks "
        r"0\.num_batches_tracked with shape=\(\), dtype=torch\.int64, lacks 2 with eps=1e-05\."
    )
    with pytest.raises(RuntimeError, match=message):
        expect_in_sync(model, world)


def _norms(guilty: str) -> Any:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(1), nn.InstanceNorm1d(1, track_running_stats=True, affine=True)]
    model: Any = nn.Sequential(*norms, nn.Linear(1, 1))
    model.register_buffer("codes", torch.zeros(1))
    if guilty == "gone":
        model[0].weight = None
    elif guilty == "frozen":
        model[2].weight.requires_grad_(False)
    elif guilty == "wide":
        model[2] = nn.Linear(1, 1, dtype=torch.float64)
    return model


def check_gradients_of_other_parameters_name_the_guilty_rank(world: Communicator) -> None:
    """Each rank names the one that differs from most, and what it has or lacks there."""
    changes = {
        "gone": r"lacks 0\.weight with shape=\(1,\), dtype=torch\.float32, requires_grad=True\. B",
        "frozen": r"has 2\.weight with requires_grad=False, lacks 2\.weight with requires",
        "wide": r"has 2\.weight with dtype=torch\.float64, has 2\.bias with",
    }
    for guilty, (change, found) in product(range(world.size), changes.items()):
        other = int(guilty == 0)
        model = _norms(change if world.rank == guilty else "")
        message = (
            rf"`parameters` must have the same order.* Compared with rank {other}, rank {guilty} "
        )
        with pytest.raises(RuntimeError, match=message + found):
            tb.average_gradients(model, world)
    given = [] if world.rank == 1 else nn.Linear(1, 1).parameters()
    with pytest.raises(RuntimeError, match=r"rank 1 lacks parameters\[0\] with"):
        tb.average_gradients(given, world)


def check_instance_norms_become_equal_and_differences_name_a_cause(world: Communicator) -> None:
    model = _norms("")
    for layer in model[:2]:
        layer.running_mean += world.rank
        layer.running_var += world.rank
    with pytest.raises(RuntimeError, match="Parameters agree, running statistics differ: the"):
        expect_in_sync(model, world)
    mean = (world.size - 1) / 2
    tb.sync_running_stats(model, world, "pool")
    assert model[0].running_var.item() == pytest.approx(1 + mean + (world.size**2 - 1) / 12)
    assert model[1].running_var.item() == pytest.approx(1 + mean)
    assert model[0].running_mean.item() == model[1].running_mean.item() == mean
    expect_in_sync(model, world)
    model.codes += world.rank
    with pytest.raises(RuntimeError, match=r"codes .* Parameters and running statistics agree: e"):
        expect_in_sync(model, world)


def check_statistics_that_no_data_have_are_named(world: Communicator) -> None:
    """An optimizer of a server's, for example, makes variances negative."""
    hows: tuple[Any, Any] = "pool", "broadcast"
    for how, value, number in product(hows, (-0.2, torch.nan, torch.inf), (0, 1)):
        model, name = _norms(""), ("running_var", "running_mean")[number]
        guilty = 0 if how == "broadcast" else number
        if world.rank == guilty:
            model[number].get_buffer(name).fill_(value)
        if name == "running_mean" and value == -0.2:
            tb.sync_running_stats(model, world, how)  # a mean may be negative
            continue
        message = "running statistics must be finite, and variances not negative: got invalid"
        found = rf"{message} values in layer {number} on rank\(s\) \[{guilty}\]"
        with pytest.raises(FloatingPointError, match=found):
            tb.sync_running_stats(model, world, how)
