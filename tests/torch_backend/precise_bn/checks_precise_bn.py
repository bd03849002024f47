"""Precise batch norm on real processes, whose loaders have different lengths and batch sizes."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from multibn import torch_backend as tb
from multibn.communicators import Communicator
from multibn.parity.oracle import Array
from tests.harness.runs import on, only
from tests.helpers.normalized import normalized
from tests.helpers.ranks import CountingCommunicator

RUNS = on("torchrun mpiexec", 2, 4, needs="torch")

C, D = 3, 4
EPS = 1e-5
WEIGHT = np.random.default_rng(5).normal(size=(C, D))


class Kind(NamedTuple):
    """A layer, how many ranks share its statistics (0: all), and into how many parts."""

    make: Any
    sharing: int
    num_splits: int = 1


KINDS = {
    "plain": Kind(lambda c, world: nn.BatchNorm1d(c), 1),
    "sync": Kind(lambda c, world: tb.SyncBatchNorm(c, process_group=world), 0),
    "naive": Kind(
        lambda c, world: tb.NaiveSyncBatchNorm1d(2, num_features=c, process_group=world), 2
    ),
    "sub": Kind(lambda c, world: tb.SubBatchNorm1d(2, c), 1, 2),
    "sub and sync": Kind(lambda c, world: tb.SubBatchNorm1d(2, c, process_group=world), 0, 2),
}


def _batches(rank: int) -> list[Array]:
    """`1 + rank` batches of unequal sizes and means."""
    rng = np.random.default_rng(rank)
    return [
        rng.normal(rank - step, 1 + step, (2 * (2 + (rank + step) % 3), C))
        for step in range(1 + rank)
    ]


def _loader(rank: int) -> list[torch.Tensor]:
    return [torch.from_numpy(x) for x in _batches(rank)]


def _model(world: Communicator, kind: str) -> Any:
    make = KINDS[kind].make
    model = nn.Sequential(make(C, world), nn.Linear(C, D, bias=False), nn.ReLU(), make(D, world))
    model[1].weight.data = torch.from_numpy(WEIGHT.T.copy())
    return model.double()


def _inputs(size: int, kind: str) -> list[list[dict[int, Array]]]:
    """What both layers are shown: for each step, the inputs of the ranks that have a batch."""
    first = [{r: _batches(r)[s] for r in range(size) if s <= r} for s in range(size)]
    sharing, num_splits = KINDS[kind].sharing or size, KINDS[kind].num_splits
    second = []
    for step in first:
        out = {}
        for rank, x in step.items():
            members = [r for r in step if r // sharing == rank // sharing]
            y = np.empty_like(x)
            for split in range(num_splits):
                ys = normalized([step[r][split::num_splits] for r in members], EPS)
                y[split::num_splits] = ys[members.index(rank)]
            out[rank] = np.maximum(y @ WEIGHT, 0)
        second.append(out)
    return [first, second]


def _running(layer: Any) -> tuple[Array, Array]:
    layer = getattr(layer, "bn", layer)
    return layer.running_mean.numpy().copy(), layer.running_var.numpy().copy()


def _assert_population(layer: Any, xs: Array) -> None:
    mean, var = _running(layer)
    np.testing.assert_allclose(mean, xs.mean(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(var, xs.var(0, ddof=1), rtol=1e-10)


def _precise(model: Any, data: Any, world: Communicator, **options: Any) -> None:
    tb.update_bn_stats(model, data, process_group=world, progress=False, **options)


def check_estimates_are_those_of_all_ranks_data(world: Communicator) -> None:
    """Both layers, the one behind a synchronized layer included, against NumPy.

    Of all elements, or the mean over all ranks' batches; a synchronized layer's batch is that of
    its ranks.
    """
    for kind, estimator in itertools.product(KINDS, ("population", "mean_of_var")):
        model, sharing = _model(world, kind), KINDS[kind].sharing or world.size
        _precise(model, _loader(world.rank), world, estimator=estimator)
        for layer, steps in zip((model[0], model[3]), _inputs(world.size, kind), strict=True):
            groups = [[x for step in steps for x in step.values()]]
            if estimator == "mean_of_var":
                starts = itertools.product(steps, range(0, world.size, sharing))
                groups = [[s[r] for r in range(k, k + sharing) if r in s] for s, k in starts]
            wholes = [np.concatenate(group) for group in groups if group]
            means, variances = zip(*((x.mean(0), x.var(0, ddof=1)) for x in wholes), strict=True)
            for got, of_groups in zip(_running(layer), (means, variances), strict=True):
                want = np.average(of_groups, 0)
                np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=kind)


class Scaled(nn.BatchNorm1d):
    def forward(self, x: Any, *, scales: Any, factor: Any) -> Any:  # type: ignore[override]
        return super().forward(torch.cat([x * s for s in scales]) * factor)


def check_a_rank_without_data_repeats_calls_of_any_arguments(world: Communicator) -> None:
    """Those of a forward pass of its own."""
    options: Any = {"weighting": "rank", "nonfinite": "skip"}
    own = tb.convert_sync_batchnorm(Scaled(C, eps=0.5, dtype=torch.float64), world, **options)

    def forward(model: Any, x: torch.Tensor) -> None:
        scales = [torch.full((len(x), 1), 2.0), torch.full((len(x), 1), 3.0)]
        model[0](x, scales=scales, factor=torch.ones(C))

    _precise(nn.ModuleList([own]), _loader(world.rank), world, forward_fn=forward)
    xs = [s * x for r in range(world.size) for x in _batches(r) for s in (2, 3)]
    _assert_population(own, np.concatenate(xs))


def check_a_rank_without_data_finds_none_in_arguments(world: Communicator) -> None:
    """Neither in an object, nor in a table that is as long as the batch by chance."""

    class OfPoints(nn.BatchNorm1d):
        def forward(self, points: Any, table: Any) -> Any:  # type: ignore[override]
            return super().forward(points.features) * table[0]

    def forward(model: Any, x: torch.Tensor) -> None:
        model[0](SimpleNamespace(features=x), torch.ones(len(x)))

    own = tb.convert_sync_batchnorm(OfPoints(C, dtype=torch.float64), world)
    _precise(nn.ModuleList([own]), _loader(world.rank), world, forward_fn=forward)
    _assert_population(own, np.concatenate([x for r in range(world.size) for x in _batches(r)]))


def check_a_layer_that_only_some_ranks_use_is_updated(world: Communicator) -> None:
    """It has seen data, that of those ranks; one that none uses is named."""
    model = nn.ModuleDict({name: nn.BatchNorm1d(C) for name in ("all", "one", "none")})

    def forward(m: Any, x: torch.Tensor) -> None:
        m["all"](x.float())
        if world.rank == world.size - 1:
            m["one"](x.float())

    with pytest.warns(UserWarning, match=r"layer\(s\) none saw no data on any rank") as caught:
        _precise(model, _loader(world.rank), world, forward_fn=forward)
    assert caught[0].filename == __file__
    x = np.concatenate(_batches(world.size - 1))
    np.testing.assert_allclose(model["one"].running_mean, x.mean(0), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    assert torch.equal(model["none"].running_var, torch.ones(C))  # type: ignore[arg-type]


def check_untracked_layers_are_not_waited_for(world: Communicator) -> None:
    """A synchronized layer without running statistics communicates as well."""
    model: Any = nn.Sequential(
        tb.SyncBatchNorm(C, track_running_stats=False, process_group=world, dtype=torch.float64),
        nn.BatchNorm1d(C, dtype=torch.float64),
    )
    _precise(model, _loader(world.rank), world)
    assert float(model[1].running_mean.abs().max()) < 1


@only("torchrun")
def check_a_model_in_ddp_gets_the_same_statistics(world: Communicator) -> None:
    """The wrapper's first pass would broadcast buffers: a rank without data has no part in that."""
    for layer, data in (
        (_model(world, "sync"), _loader(world.rank)),
        (nn.BatchNorm1d(C, dtype=torch.float64), _loader(world.rank) if world.rank else []),
    ):
        expected = copy.deepcopy(layer)
        wrapped = nn.parallel.DistributedDataParallel(layer)
        tb.update_bn_stats(wrapped, data, progress=False)  # group: the default one
        _precise(expected, data, world)
        torch.testing.assert_close(
            layer.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12
        )


def check_sync_running_stats_broadcasts_or_pools(world: Communicator) -> None:
    def make() -> Any:
        model: Any = nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(D).eval(), nn.Linear(2, 2))
        for i, layer in enumerate(model[:2]):
            layer.running_mean += _numbers(i, world.rank, len(layer.running_mean))
            layer.running_var += _numbers(i + 2, world.rank, len(layer.running_var)).abs()
            layer.num_batches_tracked += 5 + world.rank
        return model

    def _numbers(seed: int, rank: int, n: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng((seed, rank)).normal(size=n)).float()

    broadcast, pool = make(), make()
    counting = CountingCommunicator(world)
    if world.rank > 0:
        broadcast[0].running_var.fill_(float("nan"))
    tb.sync_running_stats(broadcast, counting)
    tb.sync_running_stats(pool, counting, how="pool")
    tb.sync_running_stats(nn.Linear(2, 2), counting)
    assert counting.take() == [2 * C + 2 * D + 2, C + D, C + D]
    for i, n in enumerate((C, D)):
        means = np.array([_numbers(i, r, n).numpy() for r in range(world.size)], "float64")
        variances = 1 + np.abs([_numbers(i + 2, r, n).numpy() for r in range(world.size)])
        np.testing.assert_allclose(broadcast[i].running_mean, means[0], rtol=1e-6)
        np.testing.assert_allclose(broadcast[i].running_var, variances[0], rtol=1e-6)
        assert int(broadcast[i].num_batches_tracked) == 5
        np.testing.assert_allclose(pool[i].running_mean, means.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(pool[i].running_var, variances.mean(0) + means.var(0), rtol=1e-6)
        assert int(pool[i].num_batches_tracked) == 5 + world.rank
