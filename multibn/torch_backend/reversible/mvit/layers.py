"""Layers of a reversible MViT: attention, MLP, fusion, blocks and stage transitions."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.torch_backend.layer.base import SyncNormBase
from multibn.torch_backend.reversible.mvit.config import RevMViTConfig, parse_fusion
from multibn.torch_backend.reversible.mvit.sizes import Grid, LayerSizes
from multibn.torch_backend.reversible.sequence import drop_scale

_POOLS: dict[str, Any] = {"avg": nn.AvgPool3d, "max": nn.MaxPool3d}
_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "avg": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
    "min": torch.minimum,
}


def normalize_last_axis(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply `norm` to the channels of `(B, ..., C)`.

    Batch norms of torch and multibn get `(B, C, L)`, or `(B, C)`, because they expect channels on
    axis 1. B stays the first axis, so that sub-batch norms split the batch by samples. Other
    modules get `x` itself.
    """
    if x.ndim == 2 or not isinstance(norm, (_NormBase, SyncNormBase)):
        return norm(x)
    flat: Tensor = norm(x.flatten(1, -2).transpose(1, 2))
    return flat.transpose(1, 2).reshape(x.shape)


def pool_tokens(
    x: Tensor, pool: nn.Module | None, thw: Grid, norm: nn.Module | None = None
) -> tuple[Tensor, Grid]:
    """Pool tokens `(B, heads, T*H*W, C)` over their grid, normalize; also return the new grid."""
    if pool is None:
        return x, thw
    volume = pool(x.flatten(0, 1).unflatten(1, thw).movedim(-1, 1).contiguous())
    pooled = volume.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
    if norm is not None:
        pooled = normalize_last_axis(norm, pooled)
    return pooled, cast(Grid, tuple(volume.shape[2:]))


def relative_position_bias(
    q: Tensor, q_thw: Grid, k_thw: Grid, tables: Mapping[int, Tensor]
) -> Tensor:
    """Return the attention bias: the sum over axes of `q` times the vector of the distance.

    Its shape is `(B, heads, prod(q_thw), prod(k_thw))` for queries `(B, heads, prod(q_thw), C)`.
    If the grids of queries and keys differ, distances are in steps of the finer grid. `tables`
    maps some of the axes T, H and W (0, 1 and 2) to vectors `(distances, C)`. A table is
    interpolated linearly to `2 * longer side - 1` distances.
    """
    q = q.unflatten(2, q_thw)
    bias = q.new_zeros(1)
    for axis, table in tables.items():
        vectors = _vectors(table, q_thw[axis], k_thw[axis])
        letter = "thw"[axis]
        products = torch.einsum(f"bnthwc,{letter}kc->bnthwk", q, vectors)
        keys = [1, 1, 1]
        keys[axis] = k_thw[axis]
        bias = bias + products.unflatten(-1, keys)
    full = bias.expand(*q.shape[:-1], *k_thw)
    return full.reshape(*q.shape[:2], math.prod(q_thw), math.prod(k_thw))


def _vectors(table: Tensor, q_size: int, k_size: int) -> Tensor:
    """Return the vector of each pair of positions along one axis, `(q_size, k_size, C)`."""
    distances = 2 * max(q_size, k_size) - 1
    if len(table) != distances:
        table = F.interpolate(table.T[None], size=distances, mode="linear")[0].T
    q_step, k_step = max(k_size / q_size, 1.0), max(q_size / k_size, 1.0)
    q_at = torch.arange(q_size, device=table.device)[:, None] * q_step
    k_at = torch.arange(k_size, device=table.device) * k_step
    return table[(q_at - k_at + (k_size - 1) * k_step).long()]


class MultiScaleAttention(nn.Module):
    """Multi-head attention that pools queries, keys and values over the token grid.

    `layer` has the sizes, `config` the options. `layer.grid` sets the size of the tables of
    relative positions; `forward` takes other grids, too.

    Fan et al., "Multiscale Vision Transformers", ICCV 2021; Li et al., "MViTv2", CVPR 2022.
    """

    def __init__(self, layer: LayerSizes, config: RevMViTConfig) -> None:
        super().__init__()
        dim, dim_out, bias = layer.dim, layer.dim_out, config.qkv_bias
        self.num_heads = layer.num_heads
        self.pool_first = config.pool_first
        self.pool_heads = 1 if config.pool_mode == "conv_unshared" else layer.num_heads
        self.separate_qkv = config.separate_qkv or config.pool_first
        self.residual_pooling = config.residual_pooling

        if self.separate_qkv:
            self.q, self.k, self.v = (nn.Linear(dim, dim_out, bias=bias) for _ in "qkv")
        else:
            self.qkv = nn.Linear(dim, 3 * dim_out, bias=bias)
        self.proj = nn.Linear(dim_out, dim_out)
        self.proj_drop = nn.Dropout(config.dropout_rate)

        channels = (dim if self.pool_first else dim_out) // self.pool_heads

        conv = partial(nn.Conv3d, channels, channels, groups=channels, bias=False)

        def pooling(kernel: Sequence[int], stride: Sequence[int]) -> list[nn.Module | None]:
            if math.prod(kernel) == math.prod(stride) == 1:
                return [None, None]
            make: Any = _POOLS.get(config.pool_mode, conv)
            pool = make(tuple(kernel), tuple(stride), tuple(k // 2 for k in kernel))
            return [pool, config.make_norm(channels, "pool") if make is conv else None]

        self.pool_q, self.norm_q = pooling(*layer.pool_q)
        self.pool_k, self.norm_k = pooling(*layer.pool_kv)
        self.pool_v, self.norm_v = pooling(*layer.pool_kv)

        strides = [layer.pool_q[1], layer.pool_kv[1]]
        for axis in (1, 2, 0):
            table = None
            if config.rel_pos_spatial if axis else config.rel_pos_temporal:
                # The table of frames ignores the pooling.
                size = layer.grid[axis] // min(stride[axis] if axis else 1 for stride in strides)
                table = nn.Parameter(torch.zeros(2 * size - 1, dim_out // layer.num_heads))
                if not config.rel_pos_zero_init:
                    nn.init.trunc_normal_(table, std=0.02)
            self.register_parameter(f"rel_pos_{'thw'[axis]}", table)

    def forward(self, x: Tensor, thw: Grid) -> Tensor:
        """Map `(B, T*H*W, dim)` on the grid `thw` to `(B, T'*H'*W', dim_out)`."""
        heads = self.num_heads
        if self.pool_first:
            q = k = v = split_heads(x, self.pool_heads)
        elif self.separate_qkv:
            q, k, v = (split_heads(linear(x), heads) for linear in (self.q, self.k, self.v))
        else:
            q, k, v = (split_heads(y, heads) for y in self.qkv(x).chunk(3, dim=-1))

        q, q_thw = pool_tokens(q, self.pool_q, thw, self.norm_q)
        k, k_thw = pool_tokens(k, self.pool_k, thw, self.norm_k)
        v, _ = pool_tokens(v, self.pool_v, thw, self.norm_v)
        if self.pool_first:
            pooled = (self.q, q), (self.k, k), (self.v, v)
            q, k, v = (split_heads(linear(merge_heads(y)), heads) for linear, y in pooled)

        positions = enumerate((self.rel_pos_t, self.rel_pos_h, self.rel_pos_w))
        tables: Any = {axis: table for axis, table in positions if table is not None}
        # With a mask, scaled_dot_product_attention chooses its kernel by whether gradients are
        # needed, so that a recomputation would differ from the first pass. In a trace, fvcore does
        # not count the operations of the fused kernel.
        if tables or torch.jit.is_tracing():
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if tables:
                scores = scores + relative_position_bias(q, q_thw, k_thw, tables)
            y = scores.softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        if self.residual_pooling:
            y = y + q
        return self.proj_drop(self.proj(merge_heads(y)))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape `(B, L, heads*C)` to `(B, heads, L, C)`."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape `(B, heads, L, C)` to `(B, L, heads*C)`."""
    return x.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them; the output is as wide as the input.

    Ignores `thw`: F and G of a block get the same arguments.
    """

    def __init__(self, dim: int, hidden: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor, thw: Grid | None = None) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SubBlock(nn.Sequential):
    """A norm, followed by attention or an MLP."""

    def forward(self, x: Tensor, *thw: Grid) -> Tensor:
        norm, function = self
        return function(normalize_last_axis(norm, x), *thw)


class TwoStreamFusion(nn.Module):
    """Fuse two streams `(B, N, C)`, concatenated to `(B, N, 2C)`; `dim` is 2C.

    `RevMViTConfig` lists the modes.
    """

    def __init__(self, mode: str, dim: int, config: RevMViTConfig) -> None:
        super().__init__()
        self.mode = mode
        linear = parse_fusion("mode", mode)
        if linear is not None:
            width, drop_rate = linear
            mlp = Mlp(dim, int(dim * width), drop_rate)
            normed = mode.startswith("ln+")
            self.fuse_fn = SubBlock(config.make_norm(dim, "fuse"), mlp) if normed else mlp

    def forward(self, x: Tensor) -> Tensor:
        if self.mode in _ELEMENTWISE:
            return _ELEMENTWISE[self.mode](*x.chunk(2, dim=-1))
        return x if self.mode == "concat" else self.fuse_fn(x) + x


class ReversibleBlock(nn.Module):
    """The modules F and G of a reversible block; `ReversibleMViT` runs them."""

    def __init__(self, layer: LayerSizes, config: RevMViTConfig) -> None:
        super().__init__()
        self.drop_path = layer.drop_path
        norm_f = config.make_norm(layer.dim, "block")
        self.F = SubBlock(OrderedDict(norm=norm_f, attn=MultiScaleAttention(layer, config)))
        norm_g = config.make_norm(layer.dim_out, "block")
        mlp = Mlp(layer.dim_out, int(layer.dim_out * config.mlp_ratio))
        self.G = SubBlock(OrderedDict(norm=norm_g, mlp=mlp))


class StageTransitionBlock(ReversibleBlock):
    """Fuse the two streams, pool their grid and change their width.

    Attention and an MLP with residual connections; autograd stores their activations. The residual
    also goes through the queries' pooling convolution and norm. If that norm has buffers, the
    residual gets a separate norm, `norm_res`, because the statistics of the residual differ.
    """

    def __init__(self, layer: LayerSizes, config: RevMViTConfig) -> None:
        super().__init__(layer, config)
        self.drop_path_mode = config.drop_path_mode
        self.project_first = not config.pool_first
        self.pre_q_fuse = TwoStreamFusion(config.pre_q_fusion, layer.dim, config)
        self.res_proj: nn.Module = nn.Identity()
        if layer.dim != layer.dim_out:
            self.res_proj = nn.Linear(layer.dim, layer.dim_out)
        self.norm_res: nn.Module | None = None
        attn: Any = self.F.attn
        if attn.norm_q is not None and list(attn.norm_q.buffers()):
            width = layer.dim_out if self.project_first else layer.dim
            self.norm_res = config.make_norm(width // attn.pool_heads, "residual")

    def forward(self, x: Tensor, thw: Grid) -> tuple[Tensor, Grid]:
        """Map both streams `(B, N, 2C)` on grid `thw` to one `(B, N', dim_out)` and its grid."""
        x = self.pre_q_fuse(x)
        skip, pooled_thw = self._residual(x, thw)
        rate = self.drop_path if self.training else 0.0
        branch_rate, output_rate = (0.0, rate) if self.drop_path_mode == "whole" else (rate, 0.0)
        x = skip + _drop_path(self.F(x, thw), branch_rate)
        x = x + _drop_path(self.G(x), branch_rate)
        return _drop_path(x, output_rate), pooled_thw

    def _residual(self, x: Tensor, thw: Grid) -> tuple[Tensor, Grid]:
        attn: Any = self.F.attn
        if self.project_first:
            x = self.res_proj(x)
        norm = attn.norm_q if self.norm_res is None else self.norm_res
        pooled, thw = pool_tokens(split_heads(x, attn.pool_heads), attn.pool_q, thw, norm)
        x = merge_heads(pooled)
        return x if self.project_first else self.res_proj(x), thw


def _drop_path(x: Tensor, rate: float) -> Tensor:
    scale = drop_scale(x, rate)
    return x if scale is None else x * scale
