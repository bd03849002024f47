"""Widths, heads, grids and pooling of the layers, computed from a config and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from multibn.torch_backend.reversible.mvit.config import RevMViTConfig, keeps_width

Grid = tuple[int, int, int]  # frames, rows and columns of tokens


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a reversible layer, or of a transition, which fuses both streams into one."""

    transition: bool
    dim: int  # of the input, fused
    dim_out: int
    num_heads: int
    grid: Grid  # of the input, at the configured resolution
    kernel_q: Sequence[int]  # (T, H, W), or () for a layer without pooling
    stride_q: Sequence[int]
    kernel_kv: Sequence[int]
    stride_kv: Sequence[int]
    drop_path: float  # probability that a sample skips a branch


def patch_grid(config: RevMViTConfig) -> Grid:
    """The grid of the embedded patches, at the configured resolution."""
    sizes = (config.num_frames, config.crop_size, config.crop_size)
    kernel, stride, padding = config.patch_kernel, config.patch_stride, config.patch_padding
    if config.patch_2d:
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    grid = _pooled(sizes, kernel, stride, padding)
    if min(grid) < 1:
        raise ValueError(
            f"`patch_kernel` must fit the input of `num_frames` and `crop_size`: got kernel "
            f"{kernel} and stride {stride} for {sizes}."
        )
    return grid


def plan(config: RevMViTConfig) -> list[LayerSizes]:
    """The sizes of all layers of a reversible MViT. Raises ValueError if two do not match."""
    dim_mul: Any = dict(config.dim_mul)  # type: ignore[arg-type]
    head_mul: Any = dict(config.head_mul)  # type: ignore[arg-type]
    strides_q = {layer: tuple(stride) for layer, *stride in config.pool_q_stride}
    strides_kv = {layer: tuple(stride) for layer, *stride in config.pool_kv_stride}
    stride_kv: Sequence[int] = config.pool_kv_stride_adaptive or ()
    fused = 2 if keeps_width(config.pre_q_fusion) else 1

    layers: list[LayerSizes] = []
    width, heads, grid = config.embed_dim, config.num_heads, patch_grid(config)
    for i in range(config.depth):
        heads = round_width(heads, head_mul.get(i, 1.0))
        dim = round_width(width, dim_mul.get(i - 1, 1.0), heads)
        next_heads = round_width(heads, head_mul.get(i + 1, 1.0))
        dim_out = round_width(dim, dim_mul.get(i, 1.0), next_heads)
        before = layers[-1].dim_out if layers else config.embed_dim
        if dim != before:
            raise ValueError(
                "`embed_dim`, `num_heads`, `dim_mul` and `head_mul` must fit each other: got width "
                f"{before} before layer {i}, which with {heads} heads takes {dim}."
            )
        if dim_out % heads:
            raise ValueError(
                f"`num_heads` must divide the width of each layer: got {heads} heads and width "
                f"{dim_out} in layer {i}."
            )
        stride_q = strides_q.get(i, ())
        if config.pool_kv_stride_adaptive is None:
            stride_kv = strides_kv.get(i, ())
        else:
            divisors = stride_q or (1, 1, 1)
            stride_kv = tuple(max(s // d, 1) for s, d in zip(stride_kv, divisors, strict=True))
        layer = LayerSizes(
            transition=i in config.buffer_layers,
            dim=dim * fused if i in config.buffer_layers else dim,
            dim_out=dim_out,
            num_heads=heads,
            grid=grid,
            kernel_q=_kernel(config, stride_q),
            stride_q=stride_q,
            kernel_kv=_kernel(config, stride_kv),
            stride_kv=stride_kv,
            drop_path=config.droppath_rate * i / max(config.depth - 1, 1),
        )
        grid = _check_layer(i, layer, config)
        layers.append(layer)
        width = dim
    return layers


def round_width(width: float, multiplier: float, divisor: int = 1) -> int:
    """The product rounded to a multiple of `divisor`, and up if that loses more than 10 %."""
    width *= multiplier
    rounded = max(1, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded


def default_kernel(stride: Sequence[int]) -> Sequence[int]:
    """The kernel of a pooling for which the config has none."""
    return tuple(s + 1 if s > 1 else s for s in stride)


def _pooled(
    grid: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | None = None,
) -> Grid:
    """The grid after a pooling, which pads by half the kernel unless `padding` says otherwise."""
    padding = [k // 2 for k in kernel] if padding is None else padding
    sizes = zip(grid, kernel, stride, padding, strict=True)
    return cast(Grid, tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes))


def _check_layer(i: int, layer: LayerSizes, config: RevMViTConfig) -> Grid:
    """The grid after the layer."""
    if config.pool_mode == "avg" and any(
        size < k
        for kernel in (layer.kernel_q, layer.kernel_kv)
        for size, k in zip(layer.grid, kernel, strict=False)
    ):
        raise ValueError(
            f"`pool_mode` 'avg' needs a grid no smaller than its kernel: got grid {layer.grid} in "
            f"layer {i}, and kernels {layer.kernel_q} and {layer.kernel_kv}."
        )
    grid = layer.grid
    if layer.kernel_q:
        grid = _pooled(grid, layer.kernel_q, layer.stride_q)
    if not layer.transition and (grid != layer.grid or layer.dim != layer.dim_out):
        raise ValueError(
            "`buffer_layers` must name each layer that pools its queries or changes the width: got "
            f"{sorted(config.buffer_layers)}, without layer {i}, which makes "
            f"{layer.dim_out} channels on grid {grid} of {layer.dim} on {layer.grid}."
        )
    if layer.transition and config.res_path == "max" and layer.kernel_q:
        residual = _pooled(layer.grid, default_kernel(layer.stride_q), layer.stride_q)
        if residual != grid:
            raise ValueError(
                f"`res_path` 'max' must give the grid of the queries: got {residual} beside {grid} "
                f"in layer {i}, where the queries have kernel {layer.kernel_q} and stride "
                f"{layer.stride_q}. Take res_path='conv', or kernels one wider than the stride."
            )
    return grid


def _kernel(config: RevMViTConfig, stride: Sequence[int]) -> Sequence[int]:
    if not stride:
        return ()
    return config.pool_kvq_kernel or default_kernel(stride)
