"""Jagged nested tensors: samples of unequal lengths, without padding. All elements count."""

from typing import Any

import torch
from torch import Tensor

from multibn.communicators import Communicator
from multibn.torch_backend.layer import functional


def values(x: Tensor, /) -> Tensor:
    """The elements of `x` as one dense tensor `(elements, C, *others)`, a view.

    `x` has the shape `(N, j, C)` or `(N, C, j, *others)`, where j is the jagged size. Raises
    TypeError for another layout, and for gaps between the samples; ValueError for another shape.
    """
    if x.layout != torch.jagged:
        raise TypeError(
            f"a nested tensor must have layout torch.jagged: got {x.layout}. Make it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged)."
        )
    if x.lengths() is not None:  # type: ignore[attr-defined]
        raise TypeError(
            "a nested tensor must have no gaps between its samples: got one with lengths. Call "
            "contiguous() first."
        )
    jagged_dim = x._ragged_idx  # type: ignore[attr-defined]
    if jagged_dim > 2 or (jagged_dim == 1 and x.ndim != 3):
        raise ValueError(
            "a nested tensor must have shape (N, j, C) or (N, C, j, *others), where j is the "
            f"jagged size: got {tuple(x.shape)}."
        )
    return x.values() if jagged_dim == 1 else x.values().movedim(1, 0)


def no_sample(x: Tensor, /) -> Tensor:
    """A tensor like `x`, dense or jagged, of no sample."""
    if not x.is_nested:
        return x.new_empty((0, *x.shape[1:]))
    nested: Any = x
    values, offsets, jagged_dim = nested.values(), nested.offsets(), nested._ragged_idx
    shape = [0 if d == jagged_dim - 1 else n for d, n in enumerate(values.shape)]
    return torch.nested.nested_tensor_from_jagged(
        values.new_empty(shape), offsets[:1].clone(), jagged_dim=jagged_dim
    )


def apply(layer: Any, communicator: Communicator, x: Any, *others: Tensor | None) -> Tensor:
    """Apply `layer` to the elements of `x` and of a residual; the result is nested like `x`."""
    residual, mask, lengths = others
    try:
        if mask is not None or lengths is not None:
            raise ValueError(
                "a nested tensor has lengths of its own: got `mask` or `lengths`, too."
            )
        if layer.training and layer._num_splits > 1:
            raise ValueError(
                "a layer that splits its batch must have a dense input: got a nested tensor. Pad "
                "the samples, and pass `lengths`."
            )
        dense = [None if t is None else values(t) for t in (x, residual)]
    except (TypeError, ValueError) as error:
        functional.refuse(error, [x], [layer.num_features], communicator)
    jagged_dim = x._ragged_idx
    if jagged_dim == 1:
        y = layer.forward(*dense)
    else:  # as many dimensions as `x` has, for layers that ask
        y = layer.forward(*(t if t is None else t.unsqueeze(2) for t in dense))
        y = y.squeeze(2).movedim(0, 1)
    return torch.nested.nested_tensor_from_jagged(y, x.offsets(), jagged_dim=jagged_dim)
