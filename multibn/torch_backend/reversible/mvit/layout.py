"""Widths, heads, grids and pooling of the layers, computed from a config and checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from multibn.torch_backend.reversible.mvit.config import RevMViTConfig, keeps_width

Grid = tuple[int, int, int]  # frames, rows and columns of tokens
Triples = list[Sequence[int]]  # (T, H, W) by layer, () for a layer without pooling


class Geometry:
    """Grid of the embedded patches, and kernels and strides of the pooling by layers.

    The five attributes have the names of SlowFast's model.
    """

    def __init__(self, config: RevMViTConfig) -> None:
        sizes = (config.num_frames, config.crop_size, config.crop_size)
        kernel, stride, padding = config.patch_kernel, config.patch_stride, config.patch_padding
        if config.patch_2d:
            kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
        self.patch_dims: Sequence[int] = _pooled(sizes, kernel, stride, padding)
        if min(self.patch_dims) < 1:
            raise ValueError(
                f"`patch_kernel` must fit the input of `num_frames` and `crop_size`: got kernel "
                f"{kernel} and stride {stride} for {sizes}."
            )
        self.stride_q: Triples = _by_layer(config, "pool_q_stride", ())[:-1]
        if config.pool_kv_stride_adaptive is None:
            self.stride_kv: Triples = _by_layer(config, "pool_kv_stride", ())[:-1]
        else:
            self.stride_kv = _adapted(config.pool_kv_stride_adaptive, self.stride_q)
        self.pool_q = [_kernel(config, stride) for stride in self.stride_q]
        self.pool_kv = [_kernel(config, stride) for stride in self.stride_kv]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a reversible layer, or of a transition, which fuses both streams into one."""

    transition: bool
    dim: int  # of the input, fused
    dim_out: int
    num_heads: int
    grid: Grid  # of the input, at the configured resolution
    kernel_q: Sequence[int]
    stride_q: Sequence[int]
    kernel_kv: Sequence[int]
    stride_kv: Sequence[int]
    drop_path: float  # probability that a sample skips a branch


def plan(config: RevMViTConfig, geometry: Geometry) -> list[LayerSizes]:
    """The sizes of all layers of a reversible MViT. Raises ValueError if two do not match."""
    depth = config.depth
    transitions = _transitions(config)
    dim_mul, head_mul = (
        [factor for (factor,) in _by_layer(config, name, (1.0,))]
        for name in ("dim_mul", "head_mul")
    )
    fused = 2 if keeps_width(config.pre_q_fusion) else 1

    layers: list[LayerSizes] = []
    width, heads = config.embed_dim, config.num_heads
    grid = cast(Grid, tuple(geometry.patch_dims))
    for i in range(depth):
        heads = round_width(heads, head_mul[i])
        dim = round_width(width, dim_mul[i - 1] if i else 1.0, heads)
        dim_out = round_width(dim, dim_mul[i], round_width(heads, head_mul[i + 1]))
        before = layers[-1].dim_out if layers else config.embed_dim
        _check_width(i, dim, before, dim_out, heads)
        transition = i in transitions
        layer = LayerSizes(
            transition=transition,
            dim=dim * fused if transition else dim,
            dim_out=dim_out,
            num_heads=heads,
            grid=grid,
            kernel_q=geometry.pool_q[i],
            stride_q=geometry.stride_q[i],
            kernel_kv=geometry.pool_kv[i],
            stride_kv=geometry.stride_kv[i],
            drop_path=config.droppath_rate * i / max(depth - 1, 1),
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


def skip_pooling(stride: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Kernel, stride and padding of the max pooling beside queries pooled by `stride`."""
    kernel = _default_kernel(stride)
    return kernel, tuple(stride), tuple(k // 2 for k in kernel)


def _transitions(config: RevMViTConfig) -> set[int]:
    transitions = set(config.buffer_layers)
    _check_layers("buffer_layers", transitions, config.depth)
    if 0 in transitions:
        problem = "layer 0, which has one stream to read and not two"
    elif config.depth - 1 in transitions:
        problem = f"the last layer, {config.depth - 1}, which has two streams to return and not one"
    elif adjacent := [i for i in transitions if i + 1 in transitions]:
        problem = f"neighbours, {adjacent[0]} and {adjacent[0] + 1}"
    else:
        return transitions
    raise ValueError(
        "`buffer_layers` must have a reversible layer on either side of each stage transition: got "
        f"{problem}."
    )


def _check_width(i: int, dim: int, before: int, dim_out: int, heads: int) -> None:
    if dim != before:
        raise ValueError(
            f"`embed_dim`, `num_heads`, `dim_mul` and `head_mul` must fit each other: got width "
            f"{before} before layer {i}, which with {heads} heads takes {dim}."
        )
    if dim_out % heads:
        raise ValueError(
            f"`num_heads` must divide the width of each layer: got {heads} heads and width "
            f"{dim_out} in layer {i}."
        )


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
        padding = [k // 2 for k in layer.kernel_q]
        grid = _pooled(grid, layer.kernel_q, layer.stride_q, padding)
    if not layer.transition and (grid != layer.grid or layer.dim != layer.dim_out):
        raise ValueError(
            "`buffer_layers` must name each layer that pools its queries or changes the width: got "
            f"{sorted(config.buffer_layers)}, without layer {i}, which makes "
            f"{layer.dim_out} channels on grid {grid} of {layer.dim} on {layer.grid}."
        )
    if layer.transition and config.res_path == "max" and layer.kernel_q:
        residual = _pooled(layer.grid, *skip_pooling(layer.stride_q))
        if residual != grid:
            raise ValueError(
                f"`res_path` 'max' must give the grid of the queries: got {residual} beside {grid} "
                f"in layer {i}, where the queries have kernel {layer.kernel_q} and stride "
                f"{layer.stride_q}. Take res_path='conv', or kernels one wider than the stride."
            )
    return grid


def _pooled(
    grid: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Grid:
    sizes = zip(grid, kernel, stride, padding, strict=True)
    return cast(Grid, tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes))


def _by_layer(config: RevMViTConfig, name: str, default: tuple[Any, ...]) -> list[Any]:
    """What the option `name` lists for each layer and the one after the last, or `default`."""
    entries = getattr(config, name)
    _check_layers(name, [layer for layer, *_ in entries], config.depth)
    values = {layer: tuple(value) for layer, *value in entries}
    return [values.get(i, default) for i in range(config.depth + 1)]


def _check_layers(name: str, layers: Iterable[int], depth: int) -> None:
    outside = [i for i in layers if not 0 <= i < depth]
    if outside:
        raise ValueError(f"`{name}` must name layers from 0 to {depth - 1}: got {outside[0]}.")


def _adapted(stride: Sequence[int], stride_q: Triples) -> Triples:
    """Strides of keys and values: `stride` divided by all strides of the queries so far."""
    adapted: Triples = []
    for divisors in stride_q:
        if divisors:
            stride = tuple(max(s // d, 1) for s, d in zip(stride, divisors, strict=True))
        adapted.append(tuple(stride))
    return adapted


def _kernel(config: RevMViTConfig, stride: Sequence[int]) -> Sequence[int]:
    if not stride:
        return ()
    return config.pool_kvq_kernel or _default_kernel(stride)


def _default_kernel(stride: Sequence[int]) -> Sequence[int]:
    return tuple(s + 1 if s > 1 else s for s in stride)
