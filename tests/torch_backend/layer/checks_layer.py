"""The torch layer on real processes: collectives, copies, DistributedDataParallel, bad input."""

import copy
import io
import math
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import multibn
from benchmarks.calls import count
from multibn import kernels
from multibn.communicators import Communicator
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.parity import oracle
from multibn.torch_backend import (
    SyncBatchNorm,
    average_gradients,
    convert_sync_batchnorm,
    sync_batch_norm,
)
from tests.harness.runs import on, only
from tests.helpers import launch

RUNS = on("torchrun mpiexec", 2, 3, needs="torch")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
    )


def _input(world: Communicator, n: int = 4, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randn(n, *(shape or (3, 8, 8)), generator=generator)


def _layer(*arguments: Any, **options: Any) -> Any:
    """A layer whose parameters and buffers need not be checked against None by the type checker."""
    return SyncBatchNorm(*arguments, **options)


def _equal_on_all_ranks(world: Communicator, *values: torch.Tensor) -> bool:
    flat = torch.cat([v.detach().double().flatten() for v in values])
    return torch.allclose(world.allreduce(flat) / world.size, flat, rtol=1e-12)


def _frames(function: Any) -> int:
    """How many calls of functions of the package `function` makes, in this thread."""
    package, calls = os.path.dirname(multibn.__file__) + os.sep, [0]

    def profile(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls[0]


def check_calls_of_a_step(world: Communicator) -> None:
    """A warm step of a dense tensor is short: small layers spend their time in Python."""
    layer, x = _layer(16, process_group=world), _input(world, 4, 16, 8, 8).requires_grad_()
    for _ in range(3):
        layer(x).backward(torch.ones_like(x))
    ys: list[Any] = []
    calls = {"forward": _frames(lambda: ys.append(layer(x)))}
    calls["backward"] = _frames(lambda: ys[0].backward(torch.ones_like(x)))
    y = layer(x).sum()
    calls["of a sum"] = _frames(y.backward)  # the gradient has stride 0, and is copied once
    line = 5 if isinstance(world, TorchDistributed) else 0  # what shared memory takes beyond MPI
    most = {"forward": 30, "backward": 17, "of a sum": 25}
    assert all(calls[name] <= most[name] + line for name in most), calls


def check_high_mean(world: Communicator) -> None:
    """Mean 1e4, std 1 in float32, where mean of squares minus squared mean has no digit left."""
    xs = [
        np.random.default_rng(rank).normal(1e4, 1, (64, 2)).astype("float32")
        for rank in range(world.size)
    ]
    zeros = [np.zeros_like(x) for x in xs]
    expected = oracle.batch_norm(xs, zeros, np.ones(2), np.zeros(2), eps=1e-5)
    layer = _layer(2, momentum=1.0, process_group=world)
    y = layer(torch.from_numpy(xs[world.rank]))
    np.testing.assert_allclose(y.detach().numpy(), expected.y[world.rank], atol=1e-5)
    unbiased = expected.var * expected.count / (expected.count - 1)
    np.testing.assert_allclose(layer.running_var, unbiased, rtol=1e-6)


def check_cumulative_average(world: Communicator) -> None:
    """momentum=None: the plain mean of the batches, empty ones left out."""
    layer = _layer(2, momentum=None, process_group=world, dtype=torch.float64)
    means = []
    for step, n in enumerate((2, 0, 5)):
        xs = [np.random.default_rng((step, rank)).normal(size=(n, 2)) for rank in range(world.size)]
        if n:
            means.append(np.concatenate(xs).mean(0))
        y = layer(torch.from_numpy(xs[world.rank]))
        assert not y.isnan().any()
    np.testing.assert_allclose(layer.running_mean, np.mean(means, axis=0), rtol=1e-12)
    assert int(layer.num_batches_tracked) == 2


def check_all_ranks_empty(world: Communicator) -> None:
    layer = _layer(3, process_group=world)
    x = torch.zeros(0, 3, 4, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()
    assert int(layer.num_batches_tracked) == 0
    assert not layer.running_mean.any()
    assert bool((layer.running_var == 1).all())


def check_sixteen_bits(world: Communicator) -> None:
    """16-bit input and output, float32 arithmetic; more elements than float16 can count."""
    for dtype, ulp in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        x = (300 + 4 * _input(world, 8, 2, 100, 100)).to(dtype)
        total = torch.stack([x.double().sum((0, 2, 3)), x.double().square().sum((0, 2, 3))])
        count = world.size * 8 * 100 * 100
        mean, meansqr = world.allreduce(total) / count
        expected = (x.double() - mean.view(1, 2, 1, 1)) / (meansqr - mean**2 + 1e-5).sqrt().view(
            1, 2, 1, 1
        )
        y, batch = sync_batch_norm(x, process_group=world)
        assert y.dtype == dtype
        assert float(batch.count) == count
        np.testing.assert_allclose(batch.mean, mean, rtol=1e-6)
        assert float((y.double() - expected).abs().max()) <= ulp * float(expected.abs().max())
    half = _layer(2, process_group=world).half()
    half(x.half().requires_grad_()).sum().backward()
    assert half.weight.grad.dtype == torch.float16
    assert math.isfinite(float(half.running_var.sum()))


class _Replicate(torch.autograd.Function):
    """The same tensor on all ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: Communicator) -> torch.Tensor:
        ctx.world = world
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Reduce.apply(gradients[0], ctx.world), None


class _Reduce(torch.autograd.Function):
    """The sum of the ranks' tensors, the same on all of them; the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: Communicator) -> torch.Tensor:
        ctx.world = world
        return world.allreduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Replicate.apply(gradients[0], ctx.world), None


def check_gradcheck_and_gradgradcheck(world: Communicator) -> None:
    """Of the whole batch as a function that all ranks know, each of them normalizing its part."""
    sizes = [2 + rank for rank in range(world.size)]
    before, after = sum(sizes[: world.rank]), sum(sizes[world.rank + 1 :])

    def function(*replicated: torch.Tensor) -> torch.Tensor:
        whole, weight, bias = (_Replicate.apply(t, world) for t in replicated)
        mine = whole[before : before + sizes[world.rank]]
        y, _ = sync_batch_norm(mine, weight, bias, process_group=world, eps=0.1)
        padded: torch.Tensor = nn.functional.pad(y, (0, 0, before, after))
        return _Reduce.apply(padded, world)

    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((sum(sizes), 2), (2,), (2,))
    ]
    assert torch.autograd.gradcheck(function, inputs)
    grad_outputs = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(function, inputs, grad_outputs.requires_grad_())


def check_copies_share_the_group(world: Communicator) -> None:
    """deepcopy, pickle, torch.save and AveragedModel of a model with a sub-world communicator."""
    group = world.split(world.rank % 2)
    model = convert_sync_batchnorm(_model(), group)
    model(_input(world))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    assert copies[0][1].process_group is group
    assert copies[3][1].process_group is group
    x = _input(world)
    expected = model(x)
    for other in copies:
        torch.testing.assert_close(other(x), expected)
        assert (other[1].process_group.rank, other[1].process_group.size) == (
            group.rank,
            group.size,
        )
    world.allreduce(torch.zeros(1))  # nobody leaves while another group still works


def check_saved_model_loads_without_a_group(world: Communicator) -> None:
    """Saved with a sub-world communicator on many ranks, run in eval by a process of its own."""
    model = convert_sync_batchnorm(_model(), world.split(0 if world.rank < 2 else 1))
    model(_input(world))
    x = torch.ones(2, 3, 8, 8)
    expected = model.eval()(x)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt")
        torch.save((model, x, expected), path)
        code = (
            "import torch, sys\n"
            f"model, x, expected = torch.load({str(path)!r}, weights_only=False)\n"
            "torch.testing.assert_close(model(x), expected)\n"
            "assert not torch.distributed.is_initialized() and 'mpi4py.MPI' not in sys.modules\n"
            "try: model.train()(x)\n"
            "except RuntimeError as error: print(error)\n"
        )
        printed = launch.printed("-c", code, interpreter=launch.python(), alone=True)
    if world.size > 2 and world.rank < 2:  # a group of two is not to be found by one process
        assert "Give the layer another communicator" in printed


def check_average_gradients(world: Communicator) -> None:
    a, b, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad = torch.full((2,), float(world.rank))
    if world.rank == 0:
        b.grad = torch.ones(2)
    frozen.requires_grad_(False)
    average_gradients([a, b, frozen], world)
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [(world.size - 1) / 2] * 2
    torch.testing.assert_close(b.grad, torch.full((2,), 1 / world.size))
    assert frozen.grad is None


def check_bad_input_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    good = torch.ones(2, 3, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3), ValueError, r"2 or more dimensions.*got shape \(3,\)"),
        (torch.ones(2, 4, 4), ValueError, r"must have 3 channels.*got 4 in shape \(2, 4, 4\)"),
        (torch.ones(2, 0, 4), ValueError, r"must have channels: got 0 in shape \(2, 0, 4\)"),
        (good.int(), TypeError, "real floating-point dtype: got torch.int32"),
        (good.numpy(), TypeError, "must be a torch.Tensor: got ndarray"),
    ]
    layer = _layer(3, process_group=world)
    for bad, kind, message in cases:
        for culprit in (0, world.size - 1):
            if world.rank == culprit:
                with pytest.raises(kind, match=message):
                    layer(bad)
            else:
                with pytest.raises(RuntimeError, match=rf"refused on rank\(s\) \[{culprit}\] of"):
                    layer(good)
    with pytest.raises(ValueError, match="must have channels: got 0"):
        sync_batch_norm(torch.ones(2, 0), process_group=world)
    layer(torch.randn(2, 3, 4))  # and the layer still works


def check_one_value_over_all_ranks_is_an_error(world: Communicator) -> None:
    layer = _layer(3, process_group=world)
    x = torch.ones(1 if world.rank == 0 else 0, 3)
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*got 1 on \d rank"):
        layer(x)
    layer(torch.ones(1, 3))  # one value on each rank is enough


@only("torchrun")
def check_ddp_trains(world: Communicator) -> None:
    """A converted model under DDP on CPU, as the model of one process on the whole batch."""
    from torch.nn.parallel import DistributedDataParallel

    for broadcast_buffers in (False, True):
        for find_unused_parameters in (False, True):
            whole = _model().double()
            xs = [_input_of(rank).double() for rank in range(world.size)]
            whole(xs[0])  # the lazy layer
            with warnings.catch_warnings():
                # torch 2.13 renames the argument; it is still how all others spell it.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
                model = DistributedDataParallel(
                    convert_sync_batchnorm(copy.deepcopy(whole)),
                    broadcast_buffers=broadcast_buffers,
                    find_unused_parameters=find_unused_parameters,
                )
            for net, x in ((model, xs[world.rank]), (whole, torch.cat(xs))):
                optimizer = torch.optim.SGD(net.parameters(), 0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    net(x).square().mean().backward()
                    optimizer.step()
            for (name, expected), got in zip(
                whole.state_dict().items(), model.module.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11, msg=name)


def _input_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def check_buffers_agree(world: Communicator) -> None:
    layer = _layer(3, process_group=world)
    for step in range(5):
        layer(_input(world, (world.rank + step) % 3, 3, 2, 2))
    assert _equal_on_all_ranks(world, layer.running_mean, layer.running_var)


def check_the_calls_of_a_step(world: Communicator) -> None:
    """Few frames of Python in a step of a layer, forward and backward: all frames are counted."""
    x, dy = torch.randn(4, 8, 4, 4, requires_grad=True), torch.randn(4, 8, 4, 4)
    alone = world.split(world.rank)
    for group in (world, alone):
        layer = SyncBatchNorm(8, process_group=group)
        # A rank that waits long looks after the others: these are frames, too.
        steps = [count(lambda f=layer: f(x).backward(dy)) for _ in range(3)]  # type: ignore[misc]
        calls = min(steps, key=lambda calls: calls["multibn"])
        if kernels.select(x.detach()) is not kernels.generic:
            assert calls["multibn"] <= 60, calls
            # Not those of pathlib and others, by which a test's process finds its launcher.
            assert sum(calls.values()) <= 120, calls
