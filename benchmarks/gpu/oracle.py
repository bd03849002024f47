"""Batch norm over several ranks in float64, by the formulas: what the numbers are judged by."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.device import DEVICE

Row = dict[str, Any]

# Largest error, in units of the largest right value.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MEAN, STD = 3.0, 2.0


class Data(NamedTuple):
    """One rank's input, and the gradient of its output; in host memory."""

    x: Tensor
    dy: Tensor


def data(
    shape: Sequence[int], dtype: torch.dtype, ranks: int, *, channels_last: bool = False
) -> list[Data]:
    """The same numbers on every rank: those of all ranks."""
    generator = torch.Generator().manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    every = []
    for rank in range(ranks):
        x, dy = (torch.randn(*shape, generator=generator) for _ in range(2))
        x = x * STD + MEAN + rank
        pair = (v.to(dtype).contiguous(memory_format=memory_format) for v in (x, dy))
        every.append(Data(*pair))
    return every


def check_layer(
    what: str, layer: Any, every: Sequence[Data], rank: int = 0, call: Any = None
) -> Iterator[Row]:
    """One training step of a new `layer` of multibn, on the GPU, against the formulas.

    `call` is the layer or something made of it, compiled for example.
    """
    dtype = every[rank].x.dtype
    C = every[rank].x.shape[1]
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, C))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, C))
    x = every[rank].x.to(DEVICE, copy=True).requires_grad_()
    y = (layer if call is None else call)(x)
    y.backward(every[rank].dy.to(DEVICE))
    right, sizes = _step(layer, every, rank)
    got = {"y": y, "dx": x.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
    got |= {name: getattr(layer, name) for name in ("running_mean", "running_var")}
    errors = {}
    for name, v in got.items():
        # A parameter's gradient has the parameter's dtype, and sums of 16-bit numbers are wide.
        bound = BOUNDS[dtype] if name in ("y", "dx") else 1e-6
        error = (v.detach().cpu().double() - right[name]).abs().max() / sizes[name]
        errors[name] = float(error) / bound
        if not errors[name] <= 1:  # or NaN
            break
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    yield row(what, errors[worst], 1.0, worst=worst)


def row(what: str, error: float, bound: float, **others: Any) -> Row:
    """The result of a check; NaN is an error."""
    return {"check": what, "error": error, "bound": bound, "ok": error <= bound, **others}


def _step(layer: Any, every: Sequence[Data], rank: int) -> tuple[Row, Row]:
    """The right values, and the sizes that errors are measured by."""
    weight, bias = (p.detach().cpu().double() for p in (layer.weight, layer.bias))
    eps, momentum = layer.eps, layer.momentum
    xs, dys = ([v.double() for v in values] for values in zip(*every, strict=True))
    axis = [i for i in range(xs[0].ndim) if i != 1]
    column = [-1 if i == 1 else 1 for i in range(xs[0].ndim)]
    n = sum(x.numel() for x in xs) / len(bias)
    mean = sum(x.sum(axis) for x in xs) / n
    var = sum(((x - mean.view(column)) ** 2).sum(axis) for x in xs) / n
    invstd = 1 / (var + eps).sqrt()
    xhats = [(x - mean.view(column)) * invstd.view(column) for x in xs]
    sum_dy = sum(dy.sum(axis) for dy in dys)
    sum_dy_xhat = sum((dy * xhat).sum(axis) for dy, xhat in zip(dys, xhats, strict=True))
    dy, xhat = dys[rank], xhats[rank]
    pull = (sum_dy.view(column) + xhat * sum_dy_xhat.view(column)) / n
    right = {
        "y": xhat * weight.view(column) + bias.view(column),
        "dx": (weight * invstd).view(column) * (dy - pull),
        "dweight": (dy * xhat).sum(axis),
        "dbias": dy.sum(axis),
        "running_mean": momentum * mean,
        "running_var": 1 - momentum + momentum * var * n / (n - 1),
    }
    sizes = {name: float(v.abs().max()) for name, v in right.items()}
    sizes["dweight"] = float((dy * xhat).abs().sum(axis).max())
    sizes["dbias"] = float(dy.abs().sum(axis).max())
    return right, sizes
