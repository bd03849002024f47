"""Batch statistics over all ranks, as a differentiable function."""

from torch import Tensor

from multibn.communicators import CommunicatorLike, as_communicator
from multibn.communicators.layer_communicator import function_communicator
from multibn.engine.plan import NormArgs
from multibn.engine.statistics import BatchStatistics
from multibn.torch_backend._torch_private import not_compiled
from multibn.torch_backend.layer import autograd, validation


@not_compiled
def batch_moments(
    x: Tensor,
    /,
    *,
    process_group: CommunicatorLike = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> BatchStatistics:
    """Return mean, biased variance and count per channel over all ranks, with gradients.

    For normalizing flows, whitening and custom losses. The function and each derivative are
    collective: one allreduce of 2C+4 float64 numbers each. The gradient of `x` is that of the sum
    of all ranks' losses. In an activation checkpoint, the recomputation communicates again.

    Parameters
    ----------
    x, process_group, mask, lengths
        As in `sync_batch_norm`, which raises the same errors.

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
    layer = function_communicator("batch_moments", as_communicator(process_group), {})
    mask = validation.mask_of(x, mask, lengths, None, layer)
    args = NormArgs(x, None, None, 1.0, validation.non_channel_axes(x), mask=mask)
    validation.validate_call(args, None, layer)
    return autograd.normalize(args, layer, "element", phase="forward")[1]
