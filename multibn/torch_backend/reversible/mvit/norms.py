"""The norms of a reversible MViT, by role; all normalize the last axis."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.torch_backend.layer.modules import SyncBatchNorm
from multibn.torch_backend.layer.synchronized import Synchronized

Role = Literal["block", "pool", "residual", "fuse", "stem", "final"]
NormFactory = Callable[[int, Role], nn.Module]


def layer_norm(dim: int, role: Role) -> nn.Module:
    """nn.LayerNorm as in the published models: eps 1e-6, but torch's 1e-5 before a fusion's MLP."""
    return nn.LayerNorm(dim, eps=1e-5 if role == "fuse" else 1e-6)


_BY_NAME: dict[str, NormFactory] = {
    "layernorm": layer_norm,
    "batchnorm": lambda dim, role: nn.BatchNorm1d(dim),
    "sync_batchnorm": lambda dim, role: SyncBatchNorm(dim),
}


def norm_factory(norm: Any) -> NormFactory:
    """`norm` itself if callable, or the factory of that name."""
    if callable(norm):
        return norm
    if isinstance(norm, str) and norm in _BY_NAME:
        return _BY_NAME[norm]
    known = ", ".join(map(repr, _BY_NAME))
    raise ValueError(
        f"`norm` must be one of {known} or a function (dim, role) -> nn.Module: got {norm!r}. "
        "Other batch norms go in as functions: norm=lambda dim, role: SubBatchNorm1d(4, dim)."
    )


def normalize_last_axis(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm` over the channels of `(B, ..., C)`.

    Batch norms of torch and multibn take channels at axis 1: they get `(B, C, L)`, or `(B, C)`. B
    stays the first axis, so that sub-batch norms split the batch by samples. Any other module gets
    `x` itself.
    """
    if x.ndim == 2 or not isinstance(norm, (_NormBase, Synchronized)):
        return norm(x)
    flat: Tensor = norm(x.flatten(1, -2).transpose(1, 2))
    return flat.transpose(1, 2).reshape(x.shape)
