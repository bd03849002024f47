"""Statistics of all ranks' batches, with gradients, against one process with the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from multibn.communicators import Communicator
from multibn.torch_backend import batch_moments
from tests.harness.runs import on, only
from tests.helpers.ranks import refusal

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")


def _parts(world: Communicator) -> tuple[list[Tensor], slice]:
    """All ranks' inputs, rank 1's empty, and where this rank's samples stand."""
    generator = torch.Generator().manual_seed(0)
    sizes = [0 if rank == 1 else 3 + rank for rank in range(world.size)]
    parts = [torch.randn(n, 3, 2, generator=generator).double() + n for n in sizes]
    start = sum(sizes[: world.rank])
    return parts, slice(start, start + sizes[world.rank])


def _whitened(x: Tensor, moments: Callable[[Tensor], Sequence[Any]]) -> Tensor:
    """Whitening by the Cholesky factor of the covariance, as layers of a flow compute it."""
    d = x.movedim(1, -1) - moments(x)[0]
    products = (d[..., None] * d[..., None, :]).movedim(1, -1).flatten(1, 2)
    factor = torch.linalg.cholesky(moments(products)[0].view(3, 3) + 1e-5 * torch.eye(3))
    return torch.linalg.solve_triangular(factor, d.movedim(-1, 1), upper=False)


def _of_one_process(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2)), x.var((0, 2), correction=0)


def check_values_and_gradients_are_those_of_one_process(world: Communicator) -> None:
    """Gradients of both orders, of a loss on the moments and on whitened samples."""
    parts, mine = _parts(world)

    def of_all_ranks(x: Tensor) -> Sequence[Any]:
        return batch_moments(x, process_group=world)

    results = []
    for x, moments, times in (
        (parts[world.rank], of_all_ranks, 1 / world.size),
        (torch.cat(parts), _of_one_process, 1),
    ):
        t = x.clone().requires_grad_()
        mean, var = moments(t)[:2]
        loss = (_whitened(t, moments) ** 3).sum() + times * (var.log() + mean.sin()).sum()
        (first,) = torch.autograd.grad(loss, t, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), t)
        results.append((mean.detach(), var.detach(), loss.detach(), first.detach(), second))
    (*found, first, second), (*expected, first_of_all, second_of_all) = results
    found[2] = world.allreduce(found[2])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first, first_of_all[mine], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, second_of_all[mine], rtol=1e-12, atol=1e-12)


@only(sizes=(2,))
def check_masks_and_compiled_programs_are_as_eager_ones(world: Communicator) -> None:
    parts, _ = _parts(world)
    whole = torch.cat([x[..., 0] for x in parts])
    mask = torch.tensor([True, False]).expand(len(parts[world.rank]), 2)
    program = torch.compile(
        lambda x: batch_moments(x, process_group=world, mask=mask).var * 2, backend="eager"
    )
    found = program(parts[world.rank])
    torch.testing.assert_close(found, 2 * whole.var(0, correction=0), rtol=1e-12, atol=0)


@only(sizes=(2, 4))
def check_a_rank_that_cannot_is_an_error_on_all(world: Communicator) -> None:
    x = torch.arange(6.0).view(3, 2)
    batch_moments(x, process_group=world)
    mask = torch.ones(2, dtype=torch.bool) if world.rank == 1 else None
    with refusal(world, 1, ValueError, "`mask` must have the shape of the input"):
        batch_moments(x, process_group=world, mask=mask)
    wide = torch.ones(3, 2 + (world.rank == 1))
    with pytest.raises(RuntimeError, match=r"\[0.*\] in batch_moments .*C=2.*\[1\] in .*C=3"):
        batch_moments(wide, process_group=world)
    bad = x / 0 if world.rank == 1 else x
    with pytest.raises(FloatingPointError, match=r"batch_moments are not finite.*\[1\]"):
        batch_moments(bad, process_group=world)
    assert batch_moments(x, process_group=world).mean.tolist() == [2.0, 3.0]
