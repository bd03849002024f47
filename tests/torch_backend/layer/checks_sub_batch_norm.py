"""Sub-batch norm with synchronization on real processes: the splits of the global batch."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.engine.masks import WEIGHTINGS
from multibn.parity import oracle
from multibn.torch_backend import SubBatchNorm2d, SubBatchNorm3d
from tests.harness.runs import on, only

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")

C = 3
SPLITS = 2


_layer: Any = SubBatchNorm2d


def check_splits_are_those_of_the_global_batch(world: Communicator) -> None:
    """The oracle takes each split of all ranks, of unlike sizes, one of them empty."""
    rng = np.random.default_rng(0)
    shapes = [(2 + 2 * rank, C, 3 + rank, 4) for rank in range(world.size)]
    if world.size > 1:
        shapes[-1] = 0, C, 5, 4
    xs = [rank + (1 + rank) * rng.normal(size=shape) for rank, shape in enumerate(shapes)]
    dys = [rng.normal(size=shape) for shape in shapes]
    weight, bias = rng.normal(1, 0.3, C), rng.normal(0, 0.3, C)
    for weighting in WEIGHTINGS:
        layer = _layer(
            SPLITS, C, process_group=world, weighting=weighting, momentum=1.0, dtype=torch.float64
        )
        values = {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}
        layer.load_state_dict(values, strict=False)
        x = torch.from_numpy(xs[world.rank]).requires_grad_()
        y = layer(x)
        y.backward(torch.from_numpy(dys[world.rank]))
        assert x.grad is not None
        gradients = [world.allreduce(p.grad).numpy() for p in (layer.weight, layer.bias)]
        splits = [
            oracle.batch_norm(
                [x[k::SPLITS] for x in xs], [dy[k::SPLITS] for dy in dys], weight, bias, eps=1e-5,
                weighting=weighting,
            )
            for k in range(SPLITS)
        ]  # fmt: skip
        means = np.array([split.mean for split in splits])
        variances = np.array([split.var * split.count / (split.count - 1) for split in splits])
        compared = [
            (gradients[0], sum(split.dweight for split in splits)),
            (gradients[1], sum(split.dbias for split in splits)),
            (layer.split_bn.running_mean, means.reshape(-1)),
            (layer.split_bn.running_var, variances.reshape(-1)),
            (layer.bn.running_mean, means.mean(0)),
            (layer.bn.running_var, variances.mean(0) + means.var(0)),
        ]
        for k, split in enumerate(splits):
            compared.append((y.detach().numpy()[k::SPLITS], split.y[world.rank]))
            compared.append((x.grad.numpy()[k::SPLITS], split.dx[world.rank]))
        errors = [oracle.relative_error(got, expected) for got, expected in compared]
        assert max(errors) < 1e-11, (weighting, errors)


def check_a_rank_with_frozen_splits_is_wrong_alone(world: Communicator) -> None:
    """The other ranks pass no message with which they could hear of the error."""
    layer = _layer(SPLITS, C, process_group=world)
    layer.split_bn.eval()
    if world.rank == 0:
        with pytest.raises(ValueError, match=r"got 2 splits for a batch of 3\. Use"):
            layer(torch.ones(3, C, 2, 2))
    layer.split_bn.train()
    assert layer(torch.randn(4, C, 2, 2)).isfinite().all()


@only("torchrun")
def check_ddp_trains_the_layer(world: Communicator) -> None:
    from torch.nn.parallel import DistributedDataParallel

    def model(**options: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv3d(2, C, 3, padding=1, bias=False),
            SubBatchNorm3d(SPLITS, C, **options),
            nn.ReLU(),
            nn.Conv3d(C, 1, 1),
        ).double()

    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4 * world.size, 2, 2, 4, 4, dtype=torch.float64, generator=generator)
    mine = batch[4 * world.rank : 4 * (world.rank + 1)]
    for broadcast_buffers in (False, True):
        whole = model()
        parallel = model(process_group=None)
        with warnings.catch_warnings():
            # torch 2.13 renames the argument; it is still how all others spell it.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            ddp = DistributedDataParallel(parallel, broadcast_buffers=broadcast_buffers)
        for net, x in ((ddp, mine), (whole, batch)):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(parallel.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(parallel.eval()(batch), whole.eval()(batch))
