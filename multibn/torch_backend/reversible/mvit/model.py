"""Reversible multi-scale vision transformers (Mangalam et al., CVPR 2022)."""

from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from multibn.torch_backend.reversible.mvit.config import RevMViTConfig
from multibn.torch_backend.reversible.mvit.layers import (
    ReversibleBlock,
    StageTransitionBlock,
    TwoStreamFusion,
    normalize_last_axis,
)
from multibn.torch_backend.reversible.mvit.sizes import Grid, layer_sizes, patch_grid
from multibn.torch_backend.reversible.sequence import ReversibleSequence


class ReversibleMViT(ReversibleSequence):
    """Layers of a reversible MViT; autograd stores activations at stage transitions only.

    Parameters
    ----------
    config
        A `RevMViTConfig`, or anything else that `RevMViTConfig.from_slowfast` takes.
    model
        Ignored. SlowFast passes the surrounding module here.

    Attributes
    ----------
    mode
        As in `config`; may be assigned.
    no_custom_backward
        SlowFast's name for the mode: True is `"stored"`, False is `"auto"`.

    Raises
    ------
    ValueError
        If an option is not valid, or two layers do not match.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch.reversible import ReversibleMViT, RevMViTConfig
    >>> config = RevMViTConfig(
    ...     patch_2d=True, patch_kernel=(8, 8), patch_stride=(8, 8), patch_padding=(0, 0),
    ...     num_frames=1, crop_size=32, embed_dim=16, depth=2,
    ... )
    >>> layers = ReversibleMViT(config)
    >>> layers(torch.randn(4, 16, 16)).shape  # 16 tokens; both streams side by side
    torch.Size([4, 16, 32])
    """

    def __init__(self, config: Any, model: Any = None) -> None:
        config = RevMViTConfig.from_slowfast(config)
        super().__init__((), mode=config.mode, tied_drop_path=config.drop_path_mode == "whole")
        layers = layer_sizes(config)
        kinds = {True: StageTransitionBlock, False: ReversibleBlock}
        self.grid = layers[0].grid
        self.dim_out = layers[-1].dim_out
        self.dropout = config.dropout_rate
        self.drop_path = [layer.drop_path for layer in layers]
        self.layers = nn.ModuleList(kinds[layer.transition](layer, config) for layer in layers)

    @property
    def no_custom_backward(self) -> bool:
        """Whether `mode` is `"stored"`; may be assigned. The name is SlowFast's."""
        return self.mode == "stored"

    @no_custom_backward.setter
    def no_custom_backward(self, value: bool) -> None:
        self.mode = "stored" if value else "auto"

    def forward(self, x: Tensor, thw: Grid | None = None) -> Tensor:  # type: ignore[override]
        """Map tokens `(B, T*H*W, embed_dim)` to both streams `(B, T'*H'*W', 2*dim_out)`.

        The streams are concatenated along channels. `thw` is the grid of the tokens, by default
        `config`'s.
        """
        thw = self.grid if thw is None else thw
        first = 0
        # In evaluation, attention can be differentiated twice, which torch's fused kernels cannot.
        # In training, the choice must not depend on is_grad_enabled(): the first pass runs without
        # gradients, the recomputation with gradients, and they would use different kernels.
        double_backward = not self.training and torch.is_grad_enabled()
        with sdpa_kernel(SDPBackend.MATH) if double_backward else nullcontext():
            for index, layer in enumerate(self.layers):
                if isinstance(layer, StageTransitionBlock):
                    x, thw = layer(self._stage(range(first, index), x, thw), thw)
                    first = index + 1
            x = self._stage(range(first, len(self.layers)), x, thw)
        return F.dropout(x, self.dropout, self.training)

    def _stage(self, indices: range, x: Tensor, thw: Grid) -> Tensor:
        """Run reversible layers, with `x` as both streams. Return the concatenated streams."""
        return torch.cat(self._run(indices, x, x, thw), dim=-1)

    def _recomputes(self, indices: range) -> bool:
        return self.training and super()._recomputes(indices)


class PatchEmbed(nn.Module):
    """A convolution over patches of an image `(B, C, H, W)` or a video `(B, C, T, H, W)`."""

    def __init__(self, config: RevMViTConfig) -> None:
        super().__init__()
        conv: Any = nn.Conv2d if config.patch_2d else nn.Conv3d
        sizes = config.patch_kernel, config.patch_stride, config.patch_padding
        self.proj: nn.Module = conv(config.in_channels, config.embed_dim, *sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return tokens `(B, T*H*W, dim)` and their grid (T, H, W)."""
        is_2d = isinstance(self.proj, nn.Conv2d)
        if x.ndim != (4 if is_2d else 5):
            wanted = "images (B, C, H, W)" if is_2d else "video (B, C, T, H, W)"
            raise ValueError(
                f"`x` must be {wanted} with patch_2d={is_2d}: got shape {tuple(x.shape)}."
            )
        x = self.proj(x)
        thw = (1, *x.shape[2:]) if is_2d else tuple(x.shape[2:])
        return x.flatten(2).transpose(1, 2), cast(Grid, thw)


class TransformerHead(nn.Module):
    """Dropout and a linear layer; in evaluation, also the activation `head_act`."""

    def __init__(self, dim: int, config: RevMViTConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.head_dropout_rate)
        self.projection = nn.Linear(dim, config.num_classes)
        self.act = config.head_act
        self.detach = config.detach_final_fc

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        x = self.projection(x.detach() if self.detach else x)
        if self.training or self.act == "none":
            return x
        return x.softmax(dim=1) if self.act == "softmax" else x.sigmoid()


class RevMViT(nn.Module):
    """Reversible multi-scale vision transformer for images or video (Mangalam et al., CVPR 2022).

    State dicts have the keys of SlowFast's reversible MViT with the same options. Published
    checkpoints load by `model.load_state_dict(torch.load(path)["model_state"])`.

    Parameters
    ----------
    config
        As for `ReversibleMViT`. Without `buffer_layers`, the model is a reversible ViT. To change
        the mode later, assign `model.rev_backbone.mode`.

    Raises
    ------
    ValueError
        If an option is not valid, or two layers do not match.

    Notes
    -----
    Collective if the norms are.

    In evaluation the model can be differentiated twice, traced and compiled with `fullgraph=True`.
    If gradients are needed in evaluation, and in torch.jit.trace, attention stores its scores
    instead of using a fused kernel.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch.reversible import RevMViT, RevMViTConfig
    >>> config = RevMViTConfig(
    ...     patch_2d=True, patch_kernel=(8, 8), patch_stride=(8, 8), patch_padding=(0, 0),
    ...     num_frames=1, crop_size=32, embed_dim=16, depth=2, num_classes=10,
    ...     norm="sync_batchnorm",
    ... )
    >>> model = RevMViT(config)
    >>> model(torch.randn(4, 3, 32, 32)).shape
    torch.Size([4, 10])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config = RevMViTConfig.from_slowfast(config)
        dim = config.embed_dim
        t, h, w = patch_grid(config)
        if config.use_fixed_sincos_pos:
            positions = sincos_positions(dim, (t, h, w)).to(torch.get_default_dtype())
            self.pos_embed = nn.Parameter(positions, requires_grad=False)
        elif config.use_abs_pos and config.sep_pos_embed:
            self.pos_embed_spatial = _learned_positions(h * w, dim)
            self.pos_embed_temporal = _learned_positions(t, dim)
        elif config.use_abs_pos:
            self.pos_embed = _learned_positions(t * h * w, dim)

        self.patch_embed = PatchEmbed(config)
        self.pos_drop = nn.Dropout(config.dropout_rate)
        self.norm_stem = config.make_norm(dim, "stem") if config.norm_stem else None
        self.rev_backbone = ReversibleMViT(config)
        width = 2 * self.rev_backbone.dim_out
        self.fuse = TwoStreamFusion(config.respath_fuse, width, config)
        concatenates = "concat" in config.respath_fuse
        self.fuse_last = concatenates and not config.use_mean_pooling
        width = width if concatenates else width // 2
        self.norm = config.make_norm(width, "final")
        self.head = TransformerHead(width, config)

        self.apply(_init_weights)
        with torch.no_grad():
            for parameter in self.head.projection.parameters():
                parameter.mul_(config.head_init_scale)

    @classmethod
    def from_config(cls, cfg: Any, **options: Any) -> "RevMViT":
        """Return a model with the config `RevMViTConfig.from_slowfast(cfg, **options)`."""
        return cls(RevMViTConfig.from_slowfast(cfg, **options))

    def forward(self, x: Any) -> Tensor:
        """Classify images `(B, C, H, W)` or video `(B, C, T, H, W)`, of any size.

        Position embeddings are interpolated. `x` may be a list of one tensor, as in SlowFast.
        Returns `(B, num_classes)`: logits in training, `head_act` of the logits in evaluation.
        Raises ValueError if `x` has the wrong number of dimensions.
        """
        if isinstance(x, list | tuple):
            (x,) = x
        x, thw = self.patch_embed(x)
        positions = self._positions()
        if positions is not None:
            x = x + resize_positions(positions, self.rev_backbone.grid, thw)
        x = self.pos_drop(x)
        if self.norm_stem is not None:
            x = normalize_last_axis(self.norm_stem, x)
        return self.head(self._pool(self.rev_backbone(x, thw)))

    def no_weight_decay(self) -> list[str]:
        """Return the names of all position embeddings; `[]` if not `zero_decay_pos_cls`."""
        if not self.config.zero_decay_pos_cls:
            return []
        names = (name for name, _ in self.named_parameters())
        return [n for n in names if n.rpartition(".")[2].startswith(("pos_embed", "rel_pos_"))]

    def _positions(self) -> Tensor | None:
        """Return the position embeddings of the configured grid, shape `(1, T*H*W, C)`."""
        if not (self.config.use_abs_pos or self.config.use_fixed_sincos_pos):
            return None
        if self.config.use_fixed_sincos_pos:
            return 2 * self.pos_embed  # as in SlowFast, for its weights
        if not self.config.sep_pos_embed:
            return self.pos_embed
        return (self.pos_embed_temporal[:, :, None] + self.pos_embed_spatial[:, None]).flatten(1, 2)

    def _pool(self, x: Tensor) -> Tensor:
        """Reduce both streams `(B, N, 2C)` to one vector for each sample."""
        if self.fuse_last:
            return self.fuse(normalize_last_axis(self.norm, x)).mean(1)
        x = self.fuse(x)
        if self.config.use_mean_pooling:
            return normalize_last_axis(self.norm, x.mean(1))
        return normalize_last_axis(self.norm, x).mean(1)


def resize_positions(positions: Tensor, thw: Grid, new_thw: Grid) -> Tensor:
    """Interpolate position embeddings `(1, T*H*W, C)` of grid `thw` trilinearly to `new_thw`."""
    if thw == new_thw:
        return positions
    volume = positions.unflatten(1, thw).movedim(-1, 1)
    return F.interpolate(volume, size=new_thw, mode="trilinear").flatten(2).transpose(1, 2)


def sincos_positions(dim: int, thw: Grid) -> Tensor:
    """Return fixed position embeddings, shape `(1, T*H*W, dim)`.

    A quarter of the channels encodes the frame, 3/8 the column and 3/8 the row. They are sines,
    then cosines, of the position times frequencies from 1 down to 1/10000 (Vaswani et al. 2017).
    """
    axes = (torch.arange(size, dtype=torch.float64) for size in thw)
    frame, row, column = torch.cartesian_prod(*axes).unbind(1)
    codes = [_sincos(dim // 4, frame), _sincos(3 * dim // 8, column), _sincos(3 * dim // 8, row)]
    return torch.cat(codes, dim=1)[None]


def _sincos(dim: int, position: Tensor) -> Tensor:
    half = dim // 2
    frequency = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = position[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def _learned_positions(count: int, dim: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, dim), std=0.02))


def _init_weights(module: nn.Module) -> None:
    """Initialize linear and convolution weights, and linear and LayerNorm biases, as published."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
        nn.init.constant_(module.bias, 0.02)
