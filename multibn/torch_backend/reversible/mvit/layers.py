"""Layers of a reversible MViT: reversible blocks, and the transitions between stages."""

import math
from typing import Any

from torch import Tensor, nn

from multibn.torch_backend.reversible.mvit.attention import (
    Grid,
    MultiScaleAttention,
    merge_heads,
    pool_tokens,
    split_heads,
)
from multibn.torch_backend.reversible.mvit.config import RevMViTConfig
from multibn.torch_backend.reversible.mvit.fusion import Mlp, TwoStreamFusion
from multibn.torch_backend.reversible.mvit.layout import LayerSizes, skip_pooling
from multibn.torch_backend.reversible.mvit.norms import NormFactory, normalize_last_axis


class AttentionSubBlock(nn.Module):
    """Norm, then attention."""

    def __init__(self, layer: LayerSizes, config: RevMViTConfig, norm: NormFactory) -> None:
        super().__init__()
        self.norm = norm(layer.dim, "block")
        self.attn = MultiScaleAttention(
            layer.dim,
            layer.dim_out,
            layer.num_heads,
            layer.grid,
            kernel_q=layer.kernel_q,
            stride_q=layer.stride_q,
            kernel_kv=layer.kernel_kv,
            stride_kv=layer.stride_kv,
            qkv_bias=config.qkv_bias,
            drop_rate=config.dropout_rate,
            pool_mode=config.pool_mode,
            pool_first=config.pool_first,
            separate_qkv=config.separate_qkv,
            rel_pos_spatial=config.rel_pos_spatial,
            rel_pos_temporal=config.rel_pos_temporal,
            rel_pos_zero_init=config.rel_pos_zero_init,
            residual_pooling=config.residual_pooling,
            norm=norm,
        )

    def forward(self, x: Tensor, thw: Grid) -> Tensor:
        return self.attn(normalize_last_axis(self.norm, x), thw)


class MlpSubBlock(nn.Module):
    """Norm, then MLP."""

    def __init__(self, dim: int, mlp_ratio: float, norm: NormFactory) -> None:
        super().__init__()
        self.norm = norm(dim, "block")
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, thw: Grid | None = None) -> Tensor:
        """Ignores `thw`: both functions of a block get the same arguments."""
        return self.mlp(normalize_last_axis(self.norm, x))


class ReversibleBlock(nn.Module):
    """The functions F and G of a reversible block, which `reversible` runs."""

    def __init__(self, layer: LayerSizes, config: RevMViTConfig, norm: NormFactory) -> None:
        super().__init__()
        self.drop_path = layer.drop_path
        self.F = AttentionSubBlock(layer, config, norm)
        self.G = MlpSubBlock(layer.dim_out, config.mlp_ratio, norm)


class StageTransitionBlock(nn.Module):
    """Fuses the two streams, pools their grid and changes their width.

    An attention and an MLP with residuals; autograd stores their activations. The residual goes
    through the queries' pooling convolution and norm, too. If this norm keeps statistics of its
    input, the residual has a norm of its own, `norm_res`, because its statistics differ.
    """

    def __init__(self, layer: LayerSizes, config: RevMViTConfig, norm: NormFactory) -> None:
        super().__init__()
        self.drop_path = layer.drop_path
        self.drop_path_mode = config.drop_path_mode
        self.project_first = not config.pool_first
        self.F = AttentionSubBlock(layer, config, norm)
        self.G = MlpSubBlock(layer.dim_out, config.mlp_ratio, norm)
        self.pre_q_fuse = TwoStreamFusion(config.pre_q_fusion, layer.dim, norm)
        self.pool_skip: nn.Module | None = None
        self.own_pool = config.res_path == "max"
        if self.own_pool and math.prod(layer.stride_q) > 1:
            shape: Any = skip_pooling(layer.stride_q)
            self.pool_skip = nn.MaxPool3d(*shape)
        self.res_proj: nn.Module = nn.Identity()
        if layer.dim != layer.dim_out:
            self.res_proj = nn.Linear(layer.dim, layer.dim_out)
        self.norm_res: nn.Module | None = None
        norm_q = self.F.attn.norm_q
        if not self.own_pool and norm_q is not None and list(norm_q.buffers()):
            width = layer.dim_out if self.project_first else layer.dim
            self.norm_res = norm(width // self.F.attn.pool_heads, "residual")

    def forward(self, x: Tensor, thw: Grid) -> tuple[Tensor, Grid]:
        """Both streams `(B, N, 2C)` on the grid `thw` to one `(B, N', dim_out)`, and its grid."""
        x = self.pre_q_fuse(x)
        skip, pooled_thw = self._residual(x, thw)
        rate = self.drop_path if self.training else 0.0
        branch_rate, output_rate = (0.0, rate) if self.drop_path_mode == "whole" else (rate, 0.0)
        x = skip + _drop_path(self.F(x, thw), branch_rate)
        x = x + _drop_path(self.G(x), branch_rate)
        return _drop_path(x, output_rate), pooled_thw

    def _residual(self, x: Tensor, thw: Grid) -> tuple[Tensor, Grid]:
        attn = self.F.attn
        if self.project_first:
            x = self.res_proj(x)
        if self.own_pool:
            heads, pool, norm = 1, self.pool_skip, None
        else:
            heads, pool = attn.pool_heads, attn.pool_q
            norm = attn.norm_q if self.norm_res is None else self.norm_res
        pooled, thw = pool_tokens(split_heads(x, heads), pool, thw, norm)
        x = merge_heads(pooled)
        return x if self.project_first else self.res_proj(x), thw


def _drop_path(x: Tensor, rate: float) -> Tensor:
    """Zero each sample with probability `rate`, else divide it by 1 - `rate`."""
    if rate == 0:
        return x
    return x * x.new_empty((len(x), 1, 1)).bernoulli_(1 - rate).div_(1 - rate)
