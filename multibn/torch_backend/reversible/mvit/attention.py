"""Multi-scale attention: self-attention with pooling over the grid of tokens."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multibn._typing import check_choice, check_int, check_ints, check_number
from multibn.torch_backend.reversible.mvit.norms import NormFactory, layer_norm, normalize_last_axis

Grid = tuple[int, int, int]  # frames, rows and columns of tokens
PoolMode = Literal["conv", "conv_unshared", "avg", "max"]
_POOLS: dict[str, Any] = {"avg": nn.AvgPool3d, "max": nn.MaxPool3d}


def pool_tokens(
    x: Tensor, pool: nn.Module | None, thw: Grid, norm: nn.Module | None = None
) -> tuple[Tensor, Grid]:
    """Tokens `(B, heads, T*H*W, C)` pooled over their grid, then normalized; and the new grid."""
    if pool is None:
        return x, thw
    volume = pool(x.flatten(0, 1).unflatten(1, thw).movedim(-1, 1).contiguous())
    pooled = volume.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
    if norm is not None:
        pooled = normalize_last_axis(norm, pooled)
    return pooled, cast(Grid, tuple(volume.shape[2:]))


def relative_position_bias(
    q: Tensor, q_thw: Grid, k_thw: Grid, tables: Sequence[Tensor | None]
) -> Tensor:
    """Attention bias of relative positions: the sum over axes of `q` times the distance's vector.

    `(B, heads, prod(q_thw), prod(k_thw))` for queries `(B, heads, prod(q_thw), C)`. If the grids
    of queries and keys differ, distances count steps of the finer grid. `tables` holds, for the
    axes T, H and W, None or vectors `(distances, C)`; linear interpolation gives a table of another
    length than `2 * longer side - 1` this length.
    """
    q = q.unflatten(2, q_thw)
    bias = q.new_zeros(1)
    for axis, table in enumerate(tables):
        if table is None:
            continue
        vectors = _vectors(table, q_thw[axis], k_thw[axis])
        letter = "thw"[axis]
        products = torch.einsum(f"bnthwc,{letter}kc->bnthwk", q, vectors)
        keys = [1, 1, 1]
        keys[axis] = k_thw[axis]
        bias = bias + products.unflatten(-1, keys)
    full = bias.expand(*q.shape[:-1], *k_thw)
    return full.reshape(*q.shape[:2], math.prod(q_thw), math.prod(k_thw))


def _vectors(table: Tensor, q_size: int, k_size: int) -> Tensor:
    """The vector of each pair of positions along one axis, shape `(q_size, k_size, C)`."""
    distances = 2 * max(q_size, k_size) - 1
    if len(table) != distances:
        table = F.interpolate(table.T[None], size=distances, mode="linear")[0].T
    q_step, k_step = max(k_size / q_size, 1.0), max(q_size / k_size, 1.0)
    q_at = torch.arange(q_size, device=table.device)[:, None] * q_step
    k_at = torch.arange(k_size, device=table.device) * k_step
    return table[(q_at - k_at + (k_size - 1) * k_step).long()]


class MultiScaleAttention(nn.Module):
    """Multi-head attention that pools queries, keys and values over the token grid.

    Parameters
    ----------
    dim, dim_out
        Width of the input and of the output; `num_heads` must divide `dim_out`, and also `dim` with
        `pool_first`.
    num_heads
        Number of heads.
    grid
        Frames, rows and columns of the input, for the size of the relative positions. `forward`
        takes other grids, too.
    kernel_q, stride_q, kernel_kv, stride_kv
        Kernels and strides of the pooling, three numbers each, or empty for no pooling.
    qkv_bias
        Whether queries, keys and values have a bias.
    drop_rate
        Dropout of the output.
    pool_mode
        `"conv"`, a depthwise convolution shared by the heads, then a norm; `"conv_unshared"`, the
        same over all channels, with `pool_first` only; `"avg"` or `"max"`.
    pool_first
        Pool the input instead of the queries, keys and values.
    separate_qkv
        Three linear layers q, k, v instead of one; implied by `pool_first`.
    rel_pos_spatial, rel_pos_temporal, rel_pos_zero_init
        Relative positions along rows and columns, along frames, and whether they start at zero.
    residual_pooling
        Add the pooled queries to the output.
    norm
        Factory of the norms after the pooling, called with the role `"pool"`.

    Raises
    ------
    TypeError, ValueError
        If a number or `pool_mode` is not valid.

    References
    ----------
    Fan et al., "Multiscale Vision Transformers", ICCV 2021; Li et al., "MViTv2", CVPR 2022.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import MultiScaleAttention
    >>> grid = (1, 4, 4)
    >>> attention = MultiScaleAttention(16, 32, 2, grid, kernel_q=(1, 3, 3), stride_q=(1, 2, 2))
    >>> attention(torch.randn(8, 16, 16), grid).shape  # a quarter of the tokens, twice as wide
    torch.Size([8, 4, 32])
    """

    rel_pos_h: Tensor | None
    rel_pos_w: Tensor | None
    rel_pos_t: Tensor | None

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        grid: Grid,
        *,
        kernel_q: Sequence[int] = (),
        stride_q: Sequence[int] = (),
        kernel_kv: Sequence[int] = (),
        stride_kv: Sequence[int] = (),
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pool_mode: PoolMode = "conv",
        pool_first: bool = False,
        separate_qkv: bool = False,
        rel_pos_spatial: bool = False,
        rel_pos_temporal: bool = False,
        rel_pos_zero_init: bool = False,
        residual_pooling: bool = False,
        norm: NormFactory = layer_norm,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("dim_out", dim_out), ("num_heads", num_heads)):
            check_int(name, value)
        sizes = {"grid": grid, "kernel_q": kernel_q, "stride_q": stride_q}
        for name, values in {**sizes, "kernel_kv": kernel_kv, "stride_kv": stride_kv}.items():
            check_ints(name, values)
        check_number("drop_rate", drop_rate, "[0, 1)")
        check_choice("pool_mode", pool_mode, PoolMode)
        self.num_heads = num_heads
        self.pool_first = pool_first
        self.pool_heads = 1 if pool_mode == "conv_unshared" else num_heads
        self.separate_qkv = separate_qkv or pool_first
        self.residual_pooling = residual_pooling

        if self.separate_qkv:
            self.q = nn.Linear(dim, dim_out, bias=qkv_bias)
            self.k = nn.Linear(dim, dim_out, bias=qkv_bias)
            self.v = nn.Linear(dim, dim_out, bias=qkv_bias)
        else:
            self.qkv = nn.Linear(dim, 3 * dim_out, bias=qkv_bias)
        self.proj = nn.Linear(dim_out, dim_out)
        self.proj_drop = nn.Dropout(drop_rate)

        channels = (dim if pool_first else dim_out) // self.pool_heads

        def pooling(kernel: Sequence[int], stride: Sequence[int]) -> list[nn.Module | None]:
            pool = _make_pool(pool_mode, channels, kernel, stride)
            return [pool, norm(channels, "pool") if isinstance(pool, nn.Conv3d) else None]

        self.pool_q, self.norm_q = pooling(kernel_q, stride_q)
        self.pool_k, self.norm_k = pooling(kernel_kv, stride_kv)
        self.pool_v, self.norm_v = pooling(kernel_kv, stride_kv)

        wanted = (rel_pos_temporal, rel_pos_spatial, rel_pos_spatial)
        strides = zip(stride_q or (1, 1, 1), stride_kv or (1, 1, 1), strict=True)
        table_strides = [(1, 1), *list(strides)[1:]]  # frames: the table is for the unpooled grid
        for axis in (1, 2, 0):
            table = None
            if wanted[axis]:
                size = max(grid[axis] // stride for stride in table_strides[axis])
                table = nn.Parameter(torch.zeros(2 * size - 1, dim_out // num_heads))
                if not rel_pos_zero_init:
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

        tables = (self.rel_pos_t, self.rel_pos_h, self.rel_pos_w)
        relative = any(table is not None for table in tables)
        # With a mask, scaled_dot_product_attention uses another kernel if gradients are needed: the
        # recomputation would not repeat the numbers of the first pass. In a trace, fvcore would not
        # count its operations.
        if relative or torch.jit.is_tracing():
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if relative:
                scores = scores + relative_position_bias(q, q_thw, k_thw, tables)
            y = scores.softmax(dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        if self.residual_pooling:
            y = y + q
        return self.proj_drop(self.proj(merge_heads(y)))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """`(B, L, heads*C)` as `(B, heads, L, C)`."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`(B, heads, L, C)` as `(B, L, heads*C)`."""
    return x.transpose(1, 2).flatten(2)


def _make_pool(
    mode: str, channels: int, kernel: Sequence[int], stride: Sequence[int]
) -> nn.Module | None:
    if math.prod(kernel) == math.prod(stride) == 1:  # also if both are empty
        return None
    shape: dict[str, Any] = {
        "kernel_size": tuple(kernel),
        "stride": tuple(stride),
        "padding": tuple(k // 2 for k in kernel),
    }
    if mode in _POOLS:
        return _POOLS[mode](**shape)
    return nn.Conv3d(channels, channels, groups=channels, bias=False, **shape)
