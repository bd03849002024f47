"""The published reversible models, by name (Mangalam et al., CVPR 2022, tables 1 and 2)."""

from typing import Any

from multibn.torch_backend.reversible.engine import Mode
from multibn.torch_backend.reversible.mvit.config import RevMViTConfig
from multibn.torch_backend.reversible.mvit.model import RevMViT

_IMAGENET: dict[str, Any] = {
    "num_frames": 1,
    "num_classes": 1000,
    "head_dropout_rate": 0.0,
    "patch_2d": True,
    "separate_qkv": True,
    "zero_decay_pos_cls": False,
}
_VIT: dict[str, Any] = {
    **_IMAGENET,
    "depth": 12,
    "patch_kernel": (16, 16),
    "patch_stride": (16, 16),
    "patch_padding": (0, 0),
}
_STAGES: dict[str, Any] = {
    "dim_mul": ((1, 2.0), (3, 2.0), (14, 2.0)),
    "head_mul": ((1, 2.0), (3, 2.0), (14, 2.0)),
    "pool_q_stride": ((1, 1, 2, 2), (3, 1, 2, 2), (14, 1, 2, 2)),
    "buffer_layers": (1, 3, 14),
}
_MVIT_B: dict[str, Any] = {
    **_IMAGENET,
    **_STAGES,
    "patch_kernel": (7, 7),
    "patch_stride": (4, 4),
    "patch_padding": (3, 3),
    "pool_kvq_kernel": (1, 3, 3),
    "pool_kv_stride_adaptive": (1, 4, 4),
    "pre_q_fusion": "concat_linear_2",
}
_MVIT_B_16X4: dict[str, Any] = {
    **_STAGES,
    "num_frames": 16,
    "patch_padding": (1, 3, 3),
    "pool_kvq_kernel": (3, 3, 3),
    "pool_kv_stride_adaptive": (1, 8, 8),
    "qkv_bias": False,
    "sep_pos_embed": True,
    "droppath_rate": 0.05,
    "zero_decay_pos_cls": False,
}


def rev_vit_s(*, norm: Any = None, mode: Mode = "auto", **options: Any) -> RevMViT:
    """Rev-ViT-S for ImageNet: 22 M parameters, 4.6 G multiply-adds.

    `norm` and `mode` are those of `RevMViT`; `options` replace published fields of `RevMViTConfig`.

    Examples
    --------
    Fewer layers and classes, for small images:

    >>> import torch
    >>> from multibn.torch_backend.reversible import rev_vit_s
    >>> model = rev_vit_s(depth=2, crop_size=32, num_classes=10)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _make({**_VIT, "embed_dim": 384, "num_heads": 6}, norm, mode, options)


def rev_vit_b(*, norm: Any = None, mode: Mode = "auto", **options: Any) -> RevMViT:
    """Rev-ViT-B for ImageNet: 87 M parameters, 17.5 G multiply-adds; as `rev_vit_s`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import rev_vit_b
    >>> with torch.device("meta"):  # without memory for the weights
    ...     model = rev_vit_b(norm="sync_batchnorm")
    >>> sum(p.numel() for p in model.parameters()) // 10**6
    87
    """
    config = {**_VIT, "embed_dim": 768, "num_heads": 12, "droppath_rate": 0.2}
    return _make(config, norm, mode, options)


def rev_vit_l(*, norm: Any = None, mode: Mode = "auto", **options: Any) -> RevMViT:
    """Rev-ViT-L for ImageNet: 305 M parameters, 61.2 G multiply-adds; as `rev_vit_s`.

    Its config is not published; the rate of stochastic depth is that of Rev-ViT-B.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import rev_vit_l
    >>> with torch.device("meta"):
    ...     model = rev_vit_l(mode="stored")
    >>> model.rev_backbone.mode
    'stored'
    """
    config = {**_VIT, "embed_dim": 1024, "num_heads": 16, "depth": 24, "droppath_rate": 0.2}
    return _make(config, norm, mode, options)


def rev_mvit_b(*, norm: Any = None, mode: Mode = "auto", **options: Any) -> RevMViT:
    """Rev-MViT-B for ImageNet: 39.7 M parameters, 8.6 G multiply-adds; as `rev_vit_s`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import rev_mvit_b
    >>> with torch.device("meta"):
    ...     model = rev_mvit_b()
    >>> model.train()(torch.empty(1, 3, 224, 224, device="meta")).shape
    torch.Size([1, 1000])
    """
    return _make(_MVIT_B, norm, mode, options)


def rev_mvit_b_16x4(*, norm: Any = None, mode: Mode = "auto", **options: Any) -> RevMViT:
    """Rev-MViT-B for Kinetics-400, 16 frames: 35 M parameters, 63.7 G multiply-adds per clip.

    Otherwise as `rev_vit_s`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch_backend.reversible import rev_mvit_b_16x4
    >>> with torch.device("meta"):
    ...     model = rev_mvit_b_16x4(num_classes=600)
    >>> model.head.projection  # for Kinetics-600
    Linear(in_features=1536, out_features=600, bias=True)
    """
    return _make(_MVIT_B_16X4, norm, mode, options)


def _make(config: dict[str, Any], norm: Any, mode: Mode, options: dict[str, Any]) -> RevMViT:
    return RevMViT(RevMViTConfig(**{**config, **options}), norm=norm, mode=mode)
