"""Patch embedding, and position embeddings."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multibn.torch_backend.reversible.mvit.attention import Grid
from multibn.torch_backend.reversible.mvit.config import RevMViTConfig


class PatchEmbed(nn.Module):
    """A convolution over patches of an image `(B, C, H, W)` or a video `(B, C, T, H, W)`."""

    def __init__(self, config: RevMViTConfig) -> None:
        super().__init__()
        conv: Any = nn.Conv2d if config.patch_2d else nn.Conv3d
        sizes = config.patch_kernel, config.patch_stride, config.patch_padding
        self.proj: nn.Module = conv(config.in_channels, config.embed_dim, *sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Tokens `(B, T*H*W, dim)` and their grid (T, H, W)."""
        flat = isinstance(self.proj, nn.Conv2d)
        if x.ndim != (4 if flat else 5):
            wanted = "images (B, C, H, W)" if flat else "video (B, C, T, H, W)"
            raise ValueError(
                f"`x` must be {wanted} with patch_2d={flat}: got shape {tuple(x.shape)}."
            )
        x = self.proj(x)
        thw = (1, *x.shape[2:]) if flat else tuple(x.shape[2:])
        return x.flatten(2).transpose(1, 2), cast(Grid, thw)


def resize_positions(positions: Tensor, thw: Grid, to: Grid) -> Tensor:
    """Position embeddings `(1, T*H*W, C)` of grid `thw`, interpolated trilinearly for grid `to`."""
    if thw == to:
        return positions
    volume = positions.unflatten(1, thw).movedim(-1, 1)
    return F.interpolate(volume, size=to, mode="trilinear").flatten(2).transpose(1, 2)


def sincos_positions(dim: int, thw: Grid) -> Tensor:
    """Fixed position embeddings, shape `(1, T*H*W, dim)`.

    A quarter of the channels encodes the frame, 3/8 the column and 3/8 the row: sines, then
    cosines, of the position times frequencies from 1 down towards 1/10000 (Vaswani et al. 2017).
    """
    t, h, w = (torch.arange(size, dtype=torch.float64) for size in thw)
    axes = torch.meshgrid(t, h, w, indexing="ij")
    frame, row, column = (axis.flatten() for axis in axes)
    codes = [_sincos(dim // 4, frame), _sincos(3 * dim // 8, column), _sincos(3 * dim // 8, row)]
    return torch.cat(codes, dim=1)[None]


def _sincos(dim: int, position: Tensor) -> Tensor:
    half = dim // 2
    frequency = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = position[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)
