"""Sub-batch norm with synchronization on real processes: the splits of the global batch."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.parity import oracle
from multibn.torch_backend import SubBatchNorm2d, SubBatchNorm3d
from tests.harness.runs import on, only

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")


C = 3
SPLITS = 2
STEPS = 3


def _layer(*arguments: Any, cls: Any = SubBatchNorm2d, **options: Any) -> Any:
    """A layer whose parameters and buffers need not be checked against None by the type checker."""
    return cls(*arguments, **options)


def _batches(world: Communicator, seed: int, dtype: str) -> tuple[list[Any], list[Any]]:
    """All ranks' inputs and output gradients: different batch and image sizes, one rank empty."""
    rng = np.random.default_rng(seed)
    sizes = [2 + 2 * rank for rank in range(world.size)]
    if seed and world.size > 1:
        sizes[-1] = 0
    shapes = [(n, C, 3 + rank, 4) for rank, n in enumerate(sizes)]
    xs = [(rank + (1 + rank) * rng.normal(size=s)).astype(dtype) for rank, s in enumerate(shapes)]
    return xs, [rng.normal(size=s).astype(dtype) for s in shapes]


def _sum(world: Communicator, x: torch.Tensor) -> Any:
    return world.allreduce(x.double()).numpy()


def check_splits_are_those_of_the_global_batch(world: Communicator) -> None:
    """Against the oracle on each split of all ranks, for uneven ranks, with every weighting."""
    errors: dict[str, float] = {}

    def note(name: str, got: Any, expected: Any) -> None:
        errors[name] = max(errors.get(name, 0.0), oracle.relative_error(got, expected))

    rng = np.random.default_rng(0)
    weight, bias = rng.normal(1, 0.3, C), rng.normal(0, 0.3, C)
    for weighting in ("element", "sample", "rank"):
        for dtype, memory_format in (
            ("float64", torch.contiguous_format),
            ("float64", torch.channels_last),
            ("float32", torch.channels_last),
        ):
            layer = _layer(
                SPLITS, C, process_group=world, weighting=weighting, dtype=getattr(torch, dtype)
            )
            layer.load_state_dict(
                {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}, strict=False
            )
            running = [(np.zeros(C), np.ones(C)) for _ in range(SPLITS)]
            for step in range(STEPS):
                xs, dys = _batches(world, step, dtype)
                x = torch.from_numpy(xs[world.rank]).contiguous(memory_format=memory_format)
                x.requires_grad_()
                layer.zero_grad()
                y = layer(x)
                y.backward(torch.from_numpy(dys[world.rank]))
                assert x.grad is not None
                got = y.detach().numpy(), x.grad.numpy()
                dweight = _sum(world, layer.weight.grad)
                dbias = _sum(world, layer.bias.grad)
                of_splits = [
                    oracle.batch_norm(
                        [x[k::SPLITS] for x in xs],
                        [dy[k::SPLITS] for dy in dys],
                        weight.astype(dtype),
                        bias.astype(dtype),
                        eps=1e-5,
                        weighting=weighting,
                    )
                    for k in range(SPLITS)
                ]
                for k, expected in enumerate(of_splits):
                    note(f"{dtype} y", got[0][k::SPLITS], expected.y[world.rank])
                    note(f"{dtype} dx", got[1][k::SPLITS], expected.dx[world.rank])
                    factor = expected.count / (expected.count - 1)
                    running[k] = oracle.running(
                        running[k], expected.mean, expected.var, factor, 0.1
                    )
                note(f"{dtype} dweight", dweight, sum(e.dweight for e in of_splits))
                note(f"{dtype} dbias", dbias, sum(e.dbias for e in of_splits))
            means, variances = np.array(running).swapaxes(0, 1)
            note(f"{dtype} running_mean", layer.split_bn.running_mean, means.reshape(-1))
            note(f"{dtype} running_var", layer.split_bn.running_var, variances.reshape(-1))
            note(f"{dtype} mean", layer.bn.running_mean, means.mean(0))
            note(f"{dtype} var", layer.bn.running_var, variances.mean(0) + means.var(0))
    bounds = {"float32": 5e-6, "float64": 1e-11}
    assert all(error <= bounds[name.split()[0]] for name, error in errors.items()), errors


@only("torchrun")
def check_ddp_trains_through_a_multigrid_schedule(world: Communicator) -> None:
    """Under DistributedDataParallel, as the model of one process on the whole batch."""
    from torch.nn.parallel import DistributedDataParallel

    def model(**options: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv3d(2, C, 3, padding=1, bias=False),
            _layer(SPLITS, C, cls=SubBatchNorm3d, **options),
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
            for splits in (2, 2, 4, 4, 1, 2):
                for m in net.modules():
                    if isinstance(m, SubBatchNorm3d):
                        m.set_num_splits(splits)
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(parallel.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(parallel.eval()(batch), whole.eval()(batch))
