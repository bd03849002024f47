"""The sizes of the layers of a reversible MViT."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from multibn.torch_backend.reversible.mvit.config import RevMViTConfig

Grid = tuple[int, int, int]  # frames, rows and columns of tokens
Pooling = tuple[Sequence[int], Sequence[int]]  # kernel and stride, (1, 1, 1) without pooling


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a reversible layer or, if `transition`, of one that fuses the streams."""

    transition: bool
    dim: int  # of the input, fused
    dim_out: int
    num_heads: int
    grid: Grid  # of the input, at the configured resolution
    pool_q: Pooling
    pool_kv: Pooling
    drop_path: float  # probability that a sample skips a branch


def patch_grid(config: RevMViTConfig) -> Grid:
    """Return the grid of the embedded patches at the configured resolution."""
    sizes = (config.num_frames, config.crop_size, config.crop_size)
    kernel, stride, padding = config.patch_kernel, config.patch_stride, config.patch_padding
    if config.patch_2d:
        sizes = (1, *sizes[1:])
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    return _pooled(sizes, kernel, stride, padding)


def layer_sizes(config: RevMViTConfig) -> list[LayerSizes]:
    """Return the sizes of all layers. Raises ValueError if two layers do not match."""
    dim_mul: Any = dict(config.dim_mul)  # type: ignore[arg-type]
    head_mul: Any = dict(config.head_mul)  # type: ignore[arg-type]
    strides_q = {layer: tuple(stride) for layer, *stride in config.pool_q_stride}
    strides_kv = {layer: tuple(stride) for layer, *stride in config.pool_kv_stride}
    stride_kv: Any = config.pool_kv_stride_adaptive
    fused = 2 if "concat" in config.pre_q_fusion else 1

    layers: list[LayerSizes] = []
    dim, heads, grid = config.embed_dim, config.num_heads, patch_grid(config)
    for i in range(config.depth):
        heads = round_width(heads, head_mul.get(i, 1.0))
        next_heads = round_width(heads, head_mul.get(i + 1, 1.0))
        dim_out = round_width(dim, dim_mul.get(i, 1.0), next_heads)
        if dim % heads or dim_out % heads:
            raise ValueError(
                f"`num_heads` must divide the width of each layer: got {heads} heads and widths "
                f"{dim} and {dim_out} in layer {i}."
            )
        kernel, stride = pool_q = _pooling(config, strides_q.get(i))
        if config.pool_kv_stride_adaptive is None:
            stride_kv = strides_kv.get(i)
        else:
            stride_kv = tuple(max(s // d, 1) for s, d in zip(stride_kv, stride, strict=True))
        layer = LayerSizes(
            transition=i in config.buffer_layers,
            dim=dim * fused if i in config.buffer_layers else dim,
            dim_out=dim_out,
            num_heads=heads,
            grid=grid,
            pool_q=pool_q,
            pool_kv=_pooling(config, stride_kv),
            drop_path=config.droppath_rate * i / max(config.depth - 1, 1),
        )
        grid = _pooled(grid, kernel, stride, [k // 2 for k in kernel])
        if not layer.transition and (grid != layer.grid or dim_out != dim):
            raise ValueError(
                "`buffer_layers` must include every layer that pools queries or changes the width: "
                f"got {sorted(config.buffer_layers)}, but layer {i} changes {dim} channels on grid "
                f"{layer.grid} to {dim_out} on {grid}."
            )
        layers.append(layer)
        dim = dim_out
    return layers


def round_width(width: float, multiplier: float, divisor: int = 1) -> int:
    """Return the product rounded to a multiple of `divisor`, up if that would lose 10 %."""
    width *= multiplier
    rounded = max(1, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded


def _pooled(
    grid: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Grid:
    """Return the grid after pooling."""
    sizes = zip(grid, kernel, stride, padding, strict=True)
    return cast(Grid, tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes))


def _pooling(config: RevMViTConfig, stride: Sequence[int] | None) -> Pooling:
    if stride is None:
        return (1, 1, 1), (1, 1, 1)
    return config.pool_kvq_kernel or tuple(s + 1 if s > 1 else s for s in stride), stride
