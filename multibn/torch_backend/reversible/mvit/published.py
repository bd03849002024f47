"""The published reversible models, by name (Mangalam et al., CVPR 2022, tables 1 and 2)."""

from typing import Any, Literal, TypeAlias

from multibn._typing import check_choice
from multibn.torch_backend.reversible.mvit.config import RevMViTConfig
from multibn.torch_backend.reversible.mvit.model import RevMViT

Published: TypeAlias = Literal[
    "rev_vit_s", "rev_vit_b", "rev_vit_l", "rev_mvit_b", "rev_mvit_b_16x4"
]

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
_CONFIGS: dict[str, dict[str, Any]] = {
    "rev_vit_s": {**_VIT, "embed_dim": 384, "num_heads": 6},
    "rev_vit_b": {**_VIT, "embed_dim": 768, "num_heads": 12, "droppath_rate": 0.2},
    # Its config is not published; the rate of stochastic depth is that of Rev-ViT-B.
    "rev_vit_l": {**_VIT, "embed_dim": 1024, "num_heads": 16, "depth": 24, "droppath_rate": 0.2},
    "rev_mvit_b": {
        **_IMAGENET,
        **_STAGES,
        "patch_kernel": (7, 7),
        "patch_stride": (4, 4),
        "patch_padding": (3, 3),
        "pool_kvq_kernel": (1, 3, 3),
        "pool_kv_stride_adaptive": (1, 4, 4),
        "pre_q_fusion": "concat_linear_2",
    },
    "rev_mvit_b_16x4": {
        **_STAGES,
        "num_frames": 16,
        "patch_padding": (1, 3, 3),
        "pool_kvq_kernel": (3, 3, 3),
        "pool_kv_stride_adaptive": (1, 8, 8),
        "qkv_bias": False,
        "sep_pos_embed": True,
        "droppath_rate": 0.05,
        "zero_decay_pos_cls": False,
    },
}


def published_rev_mvit(name: Published, **options: Any) -> RevMViT:
    """A published reversible model.

    Parameters
    ----------
    name
        For ImageNet `"rev_vit_s"` (22 M parameters, 4.6 G multiply-adds), `"rev_vit_b"` (87 M,
        17.5 G), `"rev_vit_l"` (305 M, 61.2 G) or `"rev_mvit_b"` (39.7 M, 8.6 G); for 16 frames of
        Kinetics-400 `"rev_mvit_b_16x4"` (35 M, 63.7 G a clip).
    **options
        Fields of `RevMViTConfig` that replace the published ones.

    Raises
    ------
    ValueError
        If `name` is another, or as `RevMViT`.

    Examples
    --------
    Fewer layers and classes, for small images:

    >>> import torch
    >>> from multibn.torch_backend.reversible import published_rev_mvit
    >>> model = published_rev_mvit("rev_vit_s", depth=2, crop_size=32, num_classes=10)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_choice("name", name, Published)
    return RevMViT(RevMViTConfig(**{**_CONFIGS[name], **options}))
