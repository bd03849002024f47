"""The statistics of each layer, seen by `observing`, in both frameworks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multibn import SingleProcess, observing
from multibn._arrays import to_host
from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.parity.oracle import relative_error
from multibn.torch_backend import (
    SubBatchNorm1d,
    SyncBatchNorm,
    checkpoint_contexts,
    convert_sub_batchnorm,
    convert_sync_batchnorm,
)
from tests.helpers.ranks import CountingCommunicator, run_ranks

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

NEEDS = "torch chainer"

SIZES = [(4,), (3, 0, 5), (0, 0)]  # samples of each rank


def data(sizes: Sequence[int]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(3, 2, (n, 4, 5)) for n in sizes]


def torchs(communicator: Any) -> tuple[Any, Callable[[Any], Any]]:
    layers = [nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.BatchNorm1d(4, affine=False)]
    model = convert_sync_batchnorm(nn.Sequential(*layers).double(), communicator)

    def step(x: Any) -> None:
        model(torch.from_numpy(x).requires_grad_()).sum().backward()

    return model, step


def chainers(communicator: Any) -> tuple[Any, Callable[[Any], Any]]:
    options: Any = {"use_gamma": False, "use_beta": False, "eps": 1e-5, "dtype": np.float64}
    links = (MultiNodeBatchNormalization(4, communicator, **options) for _ in "ab")
    model = chainer.Sequential(next(links), F.tanh, next(links))
    return model, lambda x: F.sum(model(chainer.Variable(x))).backward()


def moments(x: Any) -> tuple[Any, Any, float]:
    if not len(x):
        return np.zeros(4), np.zeros(4), 0.0
    return x.mean((0, 2)), x.var((0, 2)), x.size / 4


def assert_statistics(found: Any, x: Any) -> None:
    mean, var, count = moments(x)
    assert relative_error(to_host(found.mean), mean) < 1e-12
    assert relative_error(to_host(found.var), var) < 1e-12
    assert float(found.count) == count


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("build, paths", [(torchs, ["0", "2"]), (chainers, ["0", "1"])])
def test_statistics_of_all_ranks_and_of_one_are_seen(
    build: Any, paths: list[str], sizes: Any
) -> None:
    def run(communicator: Any) -> tuple[list[Any], list[Any]]:
        counting = CountingCommunicator(communicator)
        _, step = build(counting)
        messages, x = [], data(sizes)[communicator.rank]
        step(x)
        counting.take()
        step(x)
        messages.append(counting.take())
        with observing() as seen:
            step(x)
        messages.append(counting.take())
        step(x)
        return seen, messages

    parts = data(sizes)
    mean, var, _ = moments(np.concatenate(parts))
    hidden = [np.tanh((x - mean[:, None]) / np.sqrt(var + 1e-5)[:, None]) for x in parts]
    for rank, (seen, messages) in enumerate(run_ranks(len(sizes), run)):
        assert messages[0] == messages[1]
        assert [layer.path for layer in seen] == paths
        for layer, xs in zip(seen, (parts, hidden), strict=True):
            assert_statistics(layer.batch, np.concatenate(xs))
            assert_statistics(layer.own, xs[rank])
            own = layer.own
            assert float(own.element_weight) == (1 / float(own.count) if len(xs[rank]) else 0)


def test_splits_are_seen_apart() -> None:
    x = torch.from_numpy(data([4])[0])
    with observing() as seen:
        split = convert_sub_batchnorm(nn.BatchNorm1d(4), 2)
        nn.Sequential(split, SubBatchNorm1d(2, 4)).double()(x)
    assert [s.path for s in seen] == ["0", "0", "1"]
    assert_statistics(seen[0].batch, x[:2].numpy())
    assert seen[2].own.mean.shape == (2, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo itself
def test_recomputed_and_compiled_passes_are_seen_once() -> None:
    model = nn.Sequential(SyncBatchNorm(4, process_group=SingleProcess())).double()
    bare = SyncBatchNorm(4, track_running_stats=False, process_group=SingleProcess()).double()
    x = torch.from_numpy(data([4])[0]).requires_grad_()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with observing() as seen:
        checkpoint(model, x, use_reentrant=False, context_fn=checkpoint_contexts).sum().backward()
        compiled(x).sum().backward()
        torch.func.jvp(bare, (x.detach(),), (x.detach(),))
        model.eval()(x)
    assert [layer.path for layer in seen] == ["0", "0", "SyncBatchNorm"]
    for layer in seen:
        assert_statistics(layer.own, x.detach().numpy())


def test_large_means_are_exact_for_this_rank_too_and_a_batch_of_vmap_is_an_axis() -> None:
    layer = SyncBatchNorm(2, process_group=SingleProcess(), track_running_stats=False).double()
    x = torch.randn(64, 2, dtype=torch.float64) + 1e8
    several = torch.randn(3, 8, 2, dtype=torch.float64)
    with observing() as seen:
        layer(x)
        torch.vmap(layer)(several)
    assert relative_error(seen[0].own.var.numpy(), x.numpy().var(0)) < 1e-12
    for statistics in seen[1][1:]:
        torch.testing.assert_close(statistics.mean, several.mean(1))
        torch.testing.assert_close(statistics.var, several.var(1, correction=0))
