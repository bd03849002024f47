"""The torch layer on real processes: collectives, copies, DistributedDataParallel, bad input."""

import copy
import pickle
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multibn import torch_backend as tb
from multibn.communicators import Communicator, Group, SingleProcess
from multibn.communicators.communicator import identity
from multibn.communicators.transports.torch_distributed import TorchDistributed
from tests.harness.runs import on
from tests.helpers import launch, require
from tests.torch_backend.steps import saved

RUNS = on("torchrun mpiexec", 2, 3, needs="torch")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
    )


def _input(world: Communicator, n: int = 4, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randn(n, *(shape or (3, 8, 8)), generator=generator)


_layer: Any = tb.SyncBatchNorm


def check_copies_share_the_group(world: Communicator) -> None:
    """deepcopy, pickle, torch.save and AveragedModel of a model with a sub-world communicator."""
    group = world.split(world.rank % 2)
    model = tb.convert_sync_batchnorm(_model(), group)
    model(_input(world))
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        saved(model),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    x = _input(world)
    expected = model(x)
    for other in copies:
        torch.testing.assert_close(other(x), expected)
        ranks = other[1].layer_communicator
        assert (ranks.rank, ranks.size) == (group.rank, group.size)
    world.allreduce(torch.zeros(1))  # nobody leaves while another group still works


def _natives(world: Communicator, ranks: list[int]) -> list[Any]:
    """Groups of these ranks as libraries give them, to processes outside, too."""
    if isinstance(world, TorchDistributed):
        return [dist.new_group(ranks), dist.DeviceMesh("cpu", ranks)]
    from mpi4py import MPI

    return [MPI.COMM_WORLD.Create(MPI.COMM_WORLD.group.Incl(ranks))]


def check_process_group_is_what_was_passed(world: Communicator) -> None:
    """Users of torch's layer hand this attribute to torch.distributed."""
    everyone = list(range(world.size))
    for native in (
        None,
        world,
        SingleProcess(),
        Group(None, "machine"),
        *_natives(world, everyone),
    ):
        model: Any = tb.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), native)
        passed = native.get_group() if isinstance(native, dist.DeviceMesh) else native
        for layer in (_layer(3, process_group=native), model[0], copy.deepcopy(model)[0]):
            assert layer.process_group is passed
        again: Any = pickle.loads(pickle.dumps(model))[0]
        mine, its = (identity(each.layer_communicator.communicator) for each in (model[0], again))
        assert mine == its
        tb.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), again.process_group)
        if isinstance(passed, dist.ProcessGroup):
            x = torch.ones(1)
            dist.all_reduce(x, group=model[0].process_group)
            assert x == world.size
            theirs = tb.convert_sync_batchnorm(nn.SyncBatchNorm(3, process_group=passed))
            assert theirs.process_group is passed
            assert tb.revert_sync_batchnorm(theirs).process_group is passed


def check_a_rank_outside_of_the_group_is_refused_at_its_first_step(world: Communicator) -> None:
    for native in _natives(world, [0]):
        model = tb.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), native)
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            each.eval()(torch.randn(2, 3, 4, 4))
            expected = pytest.raises(
                ValueError, match=r"is not part of the process group: got .* on (world )?rank \d"
            )
            with expected if world.rank else nullcontext():
                each.train()(torch.randn(2, 3, 4, 4))
            repr(each)
        if world.rank and not isinstance(native, dist.DeviceMesh):
            assert model[0].process_group == native


def check_saved_model_loads_without_a_group(world: Communicator) -> None:
    """Saved with a sub-world communicator on many ranks, run in eval by a process of its own."""
    model = tb.convert_sync_batchnorm(_model(), world.split(0 if world.rank < 2 else 1))
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
        over_torch = "Call torch.distributed.init_process_group() first."
        advice = over_torch if dist.is_initialized() else "Give the layer another communicator"
        assert advice in printed


def check_average_gradients_keeps_dtypes_and_counts_missing_as_zero(world: Communicator) -> None:
    parameters: list[Any] = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(3)]
    wide, narrow, frozen = parameters
    # Older torch lacks the attribute.
    wide_dtype = torch.float32 if hasattr(wide, "grad_dtype") else wide.dtype
    wide.grad_dtype = wide_dtype
    narrow.grad = torch.full((2,), float(world.rank), dtype=torch.bfloat16)
    if world.rank == world.size - 1:
        wide.grad = torch.full((2,), float(world.size), dtype=wide_dtype)
    frozen.requires_grad_(False)
    tb.average_gradients(parameters, world)
    assert (wide.grad.dtype, narrow.grad.dtype) == (wide_dtype, torch.bfloat16)
    assert wide.grad.tolist() == [1.0] * 2
    assert narrow.grad.tolist() == [(world.size - 1) / 2] * 2
    assert frozen.grad is None


def check_a_warning_that_is_an_error_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    """Where it would come before the first message."""
    layer, x = _layer(3, process_group=world), _input(world).requires_grad_()
    require.check_a_missing_core_on_rank_0(world.rank, lambda: layer(x))
    assert layer(x).shape == x.shape


def check_a_rank_with_frozen_splits_is_wrong_alone(world: Communicator) -> None:
    """The other ranks pass no message with which they could hear of the error."""
    layer = tb.SubBatchNorm2d(2, 3, process_group=world)
    layer.split_bn.eval()
    if world.rank == 0:
        with pytest.raises(ValueError, match=r"got 2 splits for a batch of 3\. Use"):
            layer(torch.ones(3, 3, 2, 2))
    layer.split_bn.train()
    assert layer(torch.randn(4, 3, 2, 2)).isfinite().all()
