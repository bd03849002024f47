"""The statistics of the batch that all ranks hold together, as a differentiable function."""

from torch import Tensor

from multibn.communicators import CommunicatorLike
from multibn.engine.plan import NormArgs
from multibn.engine.statistics import BatchStatistics
from multibn.torch_backend.layer import autograd, functional, validation


def batch_moments(
    x: Tensor,
    /,
    *,
    process_group: CommunicatorLike = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> BatchStatistics:
    """Return mean, biased variance and count per channel of the batch of all ranks, with gradients.

    For flows, whitening and losses of one's own. Collective, and so is each derivative: one
    allreduce each way, of 2C+4 float64 numbers. The gradient of `x` is that of the sum of all
    ranks' losses. A checkpoint that runs the function again sends the message again.

    Parameters
    ----------
    x, process_group, mask, lengths
        As in `sync_batch_norm`, and so are the errors.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import batch_moments
    >>> x = torch.tensor([[1.0, 0.0], [3.0, 4.0]], requires_grad=True)
    >>> mean, var, count, _ = batch_moments(x)
    >>> mean, var  # doctest: +ELLIPSIS
    (tensor([2., 2.], dtype=torch.float64, ...), tensor([1., 4.], dtype=torch.float64, ...))

    The covariance of the channels, for a whitening:

    >>> d = x - mean
    >>> products = torch.einsum("nc,nd->ncd", d, d).flatten(1)
    >>> batch_moments(products).mean.view(2, 2).detach()
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """
    layer = functional.function_communicator("batch_moments", process_group, {})

    def moments() -> BatchStatistics:
        where = validation.mask_of(x, mask, lengths, None, layer)
        args = NormArgs(x, None, None, 1.0, validation.non_channel_axes(x), mask=where)
        validation.validate_call(args, None, layer)
        return autograd.normalize(args, layer, "element", phase="forward")[1]

    found: BatchStatistics = autograd.uncompiled(moments)()
    return found
