"""One message each way for several layers whose inputs are ready at the same time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multibn.communicators.base import identity
from multibn.torch_backend.layer import functional
from multibn.torch_backend.layer.modules import SyncBatchNorm
from multibn.torch_backend.layer.synchronized import has_hooks, shared_conversation


def normalize_together(
    layers: Sequence[SyncBatchNorm],
    inputs: Sequence[Tensor],
    *,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """`[layer(x) for layer, x in zip(layers, inputs)]` with one message each way.

    For batch norms of which none needs another's output, such as the last one of a residual block
    and the one of its downsampling branch::

        y, shortcut = normalize_together([self.bn2, self.downsample_bn], [y, shortcut])

    In training, collective: every rank must call it with the same layers, with one allreduce of
    2C+2 float64 numbers for each layer and 2 more, and one in the backward pass if any input needs
    a gradient. The backward pass begins when autograd has the gradients of all outputs; the
    gradient of an unused output is zeros. Layers in evaluation do not communicate.

    If a layer has hooks or a forward pass of its own, which expect a call of the layer, or
    torch.compile compiles the caller, the layers run one by one: the same numbers, with one message
    for each layer. So hooks must be the same on all ranks.

    Parameters
    ----------
    layers
        Layers with any numbers of channels and the same `process_group` and `weighting`.
    inputs
        One for each layer, shape `(N, C, *spatial)`, of any floating-point dtypes, on one device.
    masks
        One for each layer, see `SyncBatchNorm`; None where all elements count.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As the layers. TypeError if one of `layers` is not a `SyncBatchNorm`. ValueError if `layers`
        is empty, `inputs` or `masks` has another length, or the layers differ in `process_group` or
        `weighting`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend import SyncBatchNorm, normalize_together
    >>> layers = SyncBatchNorm(4), SyncBatchNorm(8)
    >>> y, shortcut = normalize_together(layers, [torch.randn(2, 4, 6, 6), torch.randn(2, 8, 6, 6)])
    >>> y.shape, shortcut.shape
    (torch.Size([2, 4, 6, 6]), torch.Size([2, 8, 6, 6]))
    """
    masks = [None] * len(layers) if masks is None else masks
    _check(layers, inputs, masks)
    calls = list(zip(layers, inputs, masks, strict=True))
    sharing = [call for call in calls if call[0].training]
    if not sharing or torch.compiler.is_compiling() or any(map(_needs_call, layers)):
        return [layer(x) if m is None else layer(x, mask=m) for layer, x, m in calls]
    communicator = shared_conversation([layer for layer, _, _ in sharing])
    num_features = [layer.num_features for layer, _, _ in sharing]
    try:
        for layer, x, _ in sharing:
            if isinstance(x, Tensor):
                layer._check_input_dim(x)
        evaluated = iter([layer(x, mask=mask) for layer, x, mask in calls if not layer.training])
    except (TypeError, ValueError) as error:  # the other ranks will wait for this one
        functional.refuse(error, [x for _, x, _ in sharing], num_features, communicator)
    outputs = functional.forward_all(
        [
            bn._as_input(x, mask=functional.mask_of(x, mask, None, num_features, communicator))
            for bn, x, mask in sharing
        ],
        num_features,
        communicator,
        weighting=layers[0].weighting,
    )
    trained = iter([y for y, _ in outputs])
    return [next(trained if layer.training else evaluated) for layer in layers]


def _needs_call(layer: SyncBatchNorm) -> bool:
    own = "forward" in vars(layer) or type(layer).forward is not SyncBatchNorm.forward
    return own or has_hooks(layer)


def _check(
    layers: Sequence[SyncBatchNorm], inputs: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> None:
    """Raise unless `layers` can share a message, and there are an input and a mask for each."""
    for layer in layers:
        if not isinstance(layer, SyncBatchNorm):
            raise TypeError(
                "`layers` must be multibn.torch_backend.SyncBatchNorm layers: got "
                f"{type(layer).__qualname__}. Convert the model by convert_sync_batchnorm."
            )
    if not len(layers) == len(inputs) == len(masks) > 0:
        raise ValueError(
            "`layers` must be one or more, with an input and a mask, which may be None, for each: "
            f"got {len(layers)} layers, {len(inputs)} inputs and {len(masks)} masks."
        )
    for name, key in (("weighting", str), ("process_group", identity)):
        first, *others = (getattr(layer, name) for layer in layers)
        for other in others:
            if other is not first and key(other) != key(first):
                raise ValueError(
                    f"`layers` must have the same `{name}`: got {first!r} and {other!r}. Call them "
                    "one by one."
                )
