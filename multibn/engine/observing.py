"""Record the batch statistics of each layer in a pass, for analysis."""

from typing import Any, NamedTuple

from multibn._arrays import array_namespace, values
from multibn._typing import Array
from multibn.communicators.nonfinite import layer_of
from multibn.engine import masks
from multibn.engine.recompute import StatisticsTape
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import NormArgs, reference, steps


class LayerStatistics(NamedTuple):
    """The batch statistics of a layer in one forward pass.

    Attributes
    ----------
    path
        The layer's name in the model's state dict.
    batch, own
        Mean, biased variance and count, over all ranks and of this rank alone.

    Examples
    --------
    >>> import torch
    >>> from multibn import observing
    >>> from multibn.torch import SyncBatchNorm
    >>> with observing() as seen:
    ...     y = torch.nn.Sequential(SyncBatchNorm(1))(torch.tensor([[1.0], [3.0]]))
    >>> seen[0].path, seen[0].own.mean
    ('0', tensor([2.], dtype=torch.float64))
    """

    path: str
    batch: BatchStatistics
    own: BatchStatistics


class observing(StatisticsTape):  # noqa: N801
    """Context manager that records batch statistics; yields a list of `LayerStatistics`.

    Each training call of a layer appends one entry; recomputed passes append none. With
    `num_splits`, the splits are an extra axis, or separate entries if their sizes differ. A
    dimension of torch.func.vmap is an extra axis. No activation is kept. A layer sends the same
    messages as without the context, and computes this rank's moments once more. Not collective.

    Examples
    --------
    >>> import torch
    >>> from multibn import observing
    >>> from multibn.torch import SyncBatchNorm
    >>> layer = SyncBatchNorm(1)
    >>> with observing() as seen:
    ...     y = layer(torch.tensor([[1.0], [3.0]]))
    >>> seen[0].path, seen[0].batch.var, seen[0].batch.count.item()
    ('SyncBatchNorm', tensor([1.], dtype=torch.float64), 2.0)
    """

    def __enter__(self) -> list[LayerStatistics]:
        tape: list[LayerStatistics] = super().__enter__()
        return tape

    def keep(self, batch: BatchStatistics, args: NormArgs | None, plan: Any) -> None:
        if args is None:
            return
        layer = layer_of(plan.communicator)
        _, n = masks.weigh(args, "element")
        mean, var = reference.local_moments(args, n)
        count = 0 * batch.count + n  # an array like `batch.count`
        own = BatchStatistics(mean, var, count, count / steps.at_least_one(count) ** 2)
        # Copy: the backward pass reads the original arrays, and callers might change what they get.
        copies = [BatchStatistics(*map(_copy, each)) for each in (batch, own)]
        self.tape.append(LayerStatistics("a layer" if layer is None else layer.name, *copies))


def _copy(v: Array) -> Array:
    return array_namespace(values(v)).asarray(values(v), copy=True)
