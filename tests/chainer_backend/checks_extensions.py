"""Forgotten blocks, fine-tuning, second order and groups of Chainer links, on real processes."""

import sys
from typing import Any

import numpy as np

from multibn.chainer_backend import (
    MultiNodeBatchNormalization,
    create_mnbn_model,
    finetune_population_statistics,
    multi_node_batch_normalization,
    revert_mnbn_model,
)
from multibn.communicators import Communicator
from multibn.parity import oracle
from tests.chainer_backend.test_extensions import assert_population
from tests.harness.runs import on, only
from tests.helpers import second_order
from tests.helpers.normalized import normalized

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F, links as L  # isort: skip

RUNS = on("torchrun mpiexec", 2, 3, needs="chainer")


C = 3


def _normal(seed: Any, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


@only("torchrun")
def check_links_under_torchrun_import_no_mpi(world: Communicator) -> None:
    """A link takes torch's process groups as they are."""
    import torch.distributed as dist

    xs = [_normal(rank, 2 + rank, C) for rank in range(world.size)]
    expected = normalized(xs, 2e-5)[world.rank]
    for comm in (dist.group.WORLD, None):
        link = MultiNodeBatchNormalization(C, comm, dtype=np.float64)
        y = link(xs[world.rank]).array
        np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
    assert "mpi4py.MPI" not in sys.modules


def check_second_order_equals_one_process(world: Communicator) -> None:
    second_order.compare_with_one_process(world)


@only(needs=("torch",))
def check_second_order_equals_torchs(world: Communicator) -> None:
    """Gradients of a penalty on dx; torch's are sums of a rank, Chainer's means over ranks."""
    import torch

    from multibn.torch_backend import sync_batch_norm

    x, target = second_order.data(world.rank)
    gamma, beta = second_order.parameters()
    tensors = [torch.from_numpy(a).requires_grad_() for a in (x, gamma, beta)]
    y, _ = sync_batch_norm(*tensors, process_group=world, eps=second_order.EPS)
    loss = (torch.tanh(y) * torch.from_numpy(target)).sum()
    (dx,) = torch.autograd.grad(loss, tensors[:1], create_graph=True)
    theirs = [g.numpy() for g in torch.autograd.grad((dx**3).sum(), tensors)]
    theirs[1:] = [world.allreduce(g) / world.size for g in theirs[1:]]

    variables = [chainer.Variable(a) for a in (x, gamma, beta)]
    v, _ = multi_node_batch_normalization(*variables, comm=world, eps=second_order.EPS)
    loss_here = F.sum(F.tanh(v) * target)
    (gx,) = chainer.grad([loss_here], variables[:1], enable_double_backprop=True)
    ours = [g.array for g in chainer.grad([F.sum(gx**3)], variables)]
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def _data(rank: int) -> list[Any]:
    """`1 + rank` batches of unequal sizes and means."""
    rng = np.random.default_rng(rank)
    return [rng.normal(rank - i, 1 + i, (1 + (rank + i) % 3, C, 2)) for i in range(1 + rank)]


def _second_inputs(members: list[int]) -> list[Any]:
    """What a link behind a multi-node one and a square is shown on these ranks."""
    seen = []
    for step in range(1 + max(members)):
        ys = normalized([_data(r)[step] for r in members if r >= step], 2e-5)
        seen += [y**2 for y in ys]
    return seen


def check_finetuning_counts_all_data_of_unequal_ranks(world: Communicator) -> None:
    """Over all ranks, and over groups that have unequal numbers of steps among themselves."""
    for comm, members in (
        (world, list(range(world.size))),
        (world.split(world.rank % 2), list(range(world.rank % 2, world.size, 2))),
    ):
        plain = [L.BatchNormalization(C, dtype=np.float64) for _ in range(2)]
        model = create_mnbn_model(chainer.Sequential(plain[0], F.square, plain[1]), comm)
        finetune_population_statistics(_data(world.rank), model, converter=None, progress=False)
        assert_population(model[0], [x for r in members for x in _data(r)])
        assert_population(model[2], _second_inputs(members))
        assert model[0].N == model[2].N == 1 + max(members)
        evaluated = revert_mnbn_model(model)
        with chainer.using_config("train", False):
            x = _data(world.rank)[0]
            np.testing.assert_array_equal(evaluated(x).array, model(x).array)
    world.allreduce(np.zeros(1))  # nobody leaves while another group still works


def check_groups_share_among_themselves(world: Communicator) -> None:
    group = world.split(world.rank % 2)
    members = range(world.rank % 2, world.size, 2)
    xs, dys = ([_normal((k, r), 3, C, 2) for r in members] for k in range(2))
    link = MultiNodeBatchNormalization(C, group, dtype=np.float64)
    link.cleargrads()
    v = chainer.Variable(xs[group.rank])
    y = link(v)
    y.grad = dys[group.rank]
    y.backward()
    world.allreduce(np.zeros(1))
    expected = oracle.batch_norm(xs, dys, np.ones(C), np.zeros(C), eps=2e-5)
    np.testing.assert_allclose(y.array, expected.y[group.rank], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(v.grad, expected.dx[group.rank], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(link.gamma.grad * group.size, expected.dweight, rtol=1e-9)


def check_mixed16_is_right_where_squares_overflow_float16(world: Communicator) -> None:
    """Values beyond 256, whose squares float16 does not hold, where ChainerMN has NaN."""
    with chainer.using_config("dtype", chainer.mixed16):
        link: Any = MultiNodeBatchNormalization(C, world)
    xs, dys = ([_normal((k, r), 8, C, 4).astype("e") for r in range(world.size)] for k in range(2))
    xs = [x + np.float16(300) for x in xs]
    link.cleargrads()
    v = chainer.Variable(xs[world.rank])
    y = link(v)
    y.grad = dys[world.rank]
    y.backward()
    expected = oracle.batch_norm(xs, dys, np.ones(C), np.zeros(C), eps=2e-5)
    assert y.dtype == v.grad.dtype == np.float16
    assert link.gamma.grad.dtype == link.avg_var.dtype == np.float32
    np.testing.assert_allclose(y.array, expected.y[world.rank], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(v.grad, expected.dx[world.rank], rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(link.gamma.grad * world.size, expected.dweight, rtol=1e-4)
