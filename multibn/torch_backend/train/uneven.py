"""Training on uneven data: ranks without data left take part with empty batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from multibn.engine.lockstep import Joined, map_arrays, shortened
from multibn.torch_backend.train.synchrony import participants


@contextmanager
def join(
    model: nn.Module, process_group: Any = None, *, empty: Callable[[Any], Any] | None = None
) -> Iterator[Joined]:
    """Let ranks with unequal numbers of batches train a model together, with exact statistics.

    A context manager for a training loop in which every rank makes as many steps as the one with
    most batches. A rank without data left gets empty batches, shape `(0, ...)`, which have no
    weight in statistics and losses; its forward and backward passes, DistributedDataParallel's
    included, communicate as before. DistributedDataParallel's own join does not support
    synchronized layers. Without DistributedDataParallel, call `average_gradients` before the
    optimizer's step.

    Parameters
    ----------
    model
        The model to train; it is not changed.
    process_group
        The ranks that take part, as in `check_sync`.
    empty
        Returns an empty batch like its argument, a batch. Default: the first dimension of every
        tensor in the batch, in tuples, lists and dictionaries too, becomes 0.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        For `process_group` as `check_sync`, in the loop as `engine.lockstep.Joined`. At the end of
        the context RuntimeError on all ranks, if some left the loop while others had batches. All
        ranks may leave the loop in the same step.

    Notes
    -----
    A rank that raises in the body of the loop cannot tell the others, which may wait for it: let
    the launcher end them. The model must accept an empty batch: `x.flatten(1)` does,
    `x.view(len(x), -1)` raises. A rank that never had a batch gets tensors on the CPU.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from torch.nn import functional as F
    >>> from multibn.torch_backend import SyncBatchNorm, average_gradients, join
    >>> model = nn.Sequential(SyncBatchNorm(4), nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = [(torch.randn(n, 4), torch.zeros(n, dtype=torch.long)) for n in (8, 3)]
    >>> with join(model) as joined:
    ...     for x, target in joined(loader):
    ...         optimizer.zero_grad()
    ...         losses = F.cross_entropy(model(x), target, reduction="none")
    ...         joined.mean(losses).backward()
    ...         average_gradients(model)  # without DistributedDataParallel
    ...         optimizer.step()
    >>> model[0].num_batches_tracked
    tensor(2)
    """
    stand_in = _empty if empty is None else empty
    joined = Joined(participants(model, process_group), stand_in, _on_host)
    yield joined
    joined.leave()  # not after an exception: the other ranks may be in another collective


def _empty(batch: Any) -> Any:
    return shortened(
        batch,
        lambda x: x.new_empty((0, *x.shape[1:])),
        Tensor,
        otherwise="Pass `empty`, a function that returns an empty batch like its argument.",
    )


def _on_host(batch: Any) -> Any:
    return map_arrays(Tensor.cpu, batch, Tensor)
