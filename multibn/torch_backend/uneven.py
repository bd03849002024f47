"""Training on uneven data: ranks that have run out take part with empty batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multibn import lockstep
from multibn.torch_backend.participants import participants


class Joined(lockstep.Joined[Tensor]):
    """What `join` gives: called with this rank's data, it makes a loop over it."""

    _sum = staticmethod(torch.sum)
    _unreduced = 'reduction="none"'

    def _portable(self, batch: Any) -> Any:
        return lockstep.map_arrays(Tensor.cpu, batch, Tensor)


@contextmanager
def join(
    model: nn.Module, process_group: Any = None, *, empty: Callable[[Any], Any] | None = None
) -> Iterator[Joined]:
    """Let ranks with unequal numbers of batches train a model together, with exact statistics.

    A context manager for a training loop in which every rank makes as many steps as the one with
    most batches. A rank that has run out is given empty batches, shape `(0, ...)`: forward and
    backward pass, DistributedDataParallel's included, communicate as ever, and it counts for
    nothing. Unlike DistributedDataParallel's own join it takes care of synchronized layers, whose
    statistics are those of the batches that there are. Example::

        with join(model) as joined:
            for x, target in joined(loader):
                optimizer.zero_grad()
                losses = F.cross_entropy(model(x), target, reduction="none")
                joined.mean(losses).backward()
                optimizer.step()

    Without DistributedDataParallel, `average_gradients` goes before the optimizer's step.

    Parameters
    ----------
    model
        Tells which ranks take part; it is not changed.
    process_group
        The ranks that take part, anything that `multibn.as_communicator` takes. Default: those of a
        DistributedDataParallel in the model; else the largest group of its synchronized layers, or
        torch's default process group if that is larger.
    empty
        Makes an empty batch of a batch. Default: every tensor in it, in tuples, lists and
        dictionaries too, loses its samples, which are the first dimension; all else stays.

    Yields
    ------
    Joined
        `joined(loader)` is the loop, `joined.mean(losses)` the loss.

    Raises
    ------
    ValueError
        If `process_group` is None and a launcher started several processes, but neither the model's
        layers nor torch.distributed tell of any other than this one.
    TypeError, ValueError, RuntimeError
        As `Joined`'s methods. On leaving the context: RuntimeError on all ranks, if some broke off
        the loop while others had batches. All may break off in the same step.

    Notes
    -----
    A rank that raises in the body of the loop cannot tell the others, which may wait for it in the
    forward pass: let the launcher end them. The model must take an empty batch: `x.flatten(1)`
    does, where `x.view(len(x), -1)` cannot tell what -1 is. A rank without any batch is given
    tensors on the CPU.
    """
    joined = Joined(participants(model, process_group), _empty if empty is None else empty)
    yield joined
    joined.leave()  # not after an exception, when the other ranks may be anywhere


def _empty(batch: Any) -> Any:
    return lockstep.shortened(
        batch,
        lambda x: x.new_empty((0, *x.shape[1:])),
        Tensor,
        otherwise="Pass `empty`, which makes an empty batch of a batch.",
    )
