"""Options of a reversible MViT, read from SlowFast's configs."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from multibn._typing import check_bool, check_choice, check_int, check_ints, check_number
from multibn._warnings import warn
from multibn.torch_backend.layer.modules import SyncBatchNorm
from multibn.torch_backend.reversible.sequence import Mode

Role = Literal["block", "pool", "residual", "fuse", "stem", "final"]
NormFactory = Callable[[int, Role], nn.Module]
PoolMode = Literal["conv", "conv_unshared", "avg", "max"]
DropPathMode = Literal["residual_branch", "whole"]

# Allowed ranges of float options; the others are probabilities.
_INTERVALS = {"mlp_ratio": "(0, inf)", "head_init_scale": "(-inf, inf)"}

_NORMS: dict[Any, NormFactory] = {
    # As in the published models: torch's eps, 1e-5, before the MLP of a fusion only.
    "layernorm": lambda dim, role: nn.LayerNorm(dim, eps=1e-5 if role == "fuse" else 1e-6),
    "batchnorm": lambda dim, role: nn.BatchNorm1d(dim),
    "sync_batchnorm": lambda dim, role: SyncBatchNorm(dim),
}

_FUSION_LINEAR = re.compile(r"(ln\+)?concat_linear(_(\d+(?:\.\d+)?))?(_(\d+(?:\.\d+)?))?")

_SECTIONS = ("DATA", "MODEL", "MVIT", "DETECTION")
# Keys that are not options: the only supported value, SlowFast's default, and the reason.
_FIXED = {
    "MVIT.REV.ENABLE": (True, False, "other values select a non-reversible model"),
    "MVIT.REV.RES_PATH": ("conv", "conv", "SlowFast's own model fails with this value"),
    "DETECTION.ENABLE": (False, False, "detection is not supported"),
}

# MVIT keys that are ignored: SlowFast's reversible model does not read them either, or another
# option has the same effect.
_UNREAD = {"MVIT.CLS_EMBED_ON", "MVIT.LAYER_SCALE_INIT_VALUE", "MVIT.DIM_MUL_IN_ATT"}


def _key(key: str, default: Any) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class RevMViTConfig:
    """Options of a reversible MViT, under the names of SlowFast's keys in lower case.

    Defaults are SlowFast's, except that a reversible model has no cls token. As in SlowFast,
    options of single layers are lists that begin with the layer: `dim_mul=((1, 2.0),)` doubles the
    width in layer 1, and `pool_q_stride=((1, 1, 2, 2),)` pools its queries by (1, 2, 2).

    Parameters
    ----------
    crop_size, num_frames, in_channels
        Height and width, frames, and channels of the input (DATA.TRAIN_CROP_SIZE, NUM_FRAMES and
        the first of INPUT_CHANNEL_NUM). With `patch_2d` (images), `num_frames` is ignored.
    num_classes, head_dropout_rate, head_act, head_init_scale, detach_final_fc
        The classifier (MODEL.NUM_CLASSES, DROPOUT_RATE, HEAD_ACT, MVIT.HEAD_INIT_SCALE,
        MODEL.DETACH_FINAL_FC). In evaluation, `head_act` is applied to the logits: `"softmax"`,
        `"sigmoid"` or `"none"`. `head_init_scale` multiplies the initial weights and biases.
    pool_mode
        How tokens are pooled (MVIT.MODE): `"conv"`, a depthwise convolution shared by the heads,
        then a norm; `"conv_unshared"`, the same with a kernel per channel, not shared by heads,
        which needs `pool_first`; `"avg"` or `"max"`.
    patch_2d, patch_kernel, patch_stride, patch_padding
        The patch embedding: two numbers each for images, three for video.
    embed_dim, num_heads, depth, mlp_ratio, qkv_bias, dim_mul, head_mul
        Width and heads of layer 0; number of layers; ratio of an MLP's hidden width to its input
        width; whether queries, keys and values have biases; factors of width and heads by layer.
    pool_q_stride, pool_kv_stride, pool_kv_stride_adaptive, pool_kvq_kernel
        Strides by layer, and the kernel of all pooling. `pool_kv_stride_adaptive` replaces
        `pool_kv_stride`: it is divided by the queries' stride of layer 0 for the keys and values of
        layer 0, the result by that of layer 1, and so on. Without `pool_kvq_kernel`, a kernel is
        one larger than its stride if the stride is not 1.
    pool_first, separate_qkv, residual_pooling, rel_pos_spatial, rel_pos_temporal, rel_pos_zero_init
        Options of the attention: pool the input instead of queries, keys and values; three linear
        layers instead of one, implied by `pool_first`; add the pooled queries to the output;
        relative positions in space and in time, and whether their tables start at zero.
    use_abs_pos, sep_pos_embed, use_fixed_sincos_pos
        Learned position embeddings; separate ones for space and time; or, instead of both, fixed
        sines and cosines, which are added twice, as in SlowFast.
    norm
        Every norm of the model: `"layernorm"`, as published; `"batchnorm"`, nn.BatchNorm1d;
        `"sync_batchnorm"`, `SyncBatchNorm` over the default process group; or a function (dim,
        role) -> nn.Module, whose roles are `"block"` (before attention and MLP), `"pool"` (of
        queries, keys and values), `"residual"` (of a transition's residual, if norms have buffers),
        `"fuse"`, `"stem"` and `"final"`. Batch norms of torch and multibn get `(B, C, L)`, other
        modules `(B, ..., C)`. The function is pickled with the model.
    norm_stem, use_mean_pooling
        A norm before the first layer; average the tokens before the last norm instead of after it.
    dropout_rate, droppath_rate
        Dropout of the embedding, of the attention's output and after the last layer; stochastic
        depth, which grows linearly from 0 in layer 0 to this rate in the last layer.
    zero_decay_pos_cls
        Whether `RevMViT.no_weight_decay` returns the names of position embeddings.
    respath_fuse, pre_q_fusion
        Fusions of the streams after the last layer, and before a stage transition: `"add"`,
        `"avg"`, `"max"` or `"min"`; `"concat"`, along channels; `"concat_linear"`, the
        concatenation x plus MLP(x). `"concat_linear_2"` makes the MLP's hidden layer twice as wide
        as its input, `"concat_linear_2_0.1"` adds dropout, and a prefix `"ln+"` puts a norm before
        the MLP.
    buffer_layers
        The stage transitions: layers that are not reversible, so that grid and width can change.
    drop_path_mode
        How samples are dropped (not a key of SlowFast): `"residual_branch"` skips attention and MLP
        of a transition, and F and G of a block, independently. `"whole"` zeroes the output of a
        transition, and skips F and G of a block together, as SlowFast does.
    mode
        How the model trains (not a key of SlowFast): `"auto"` recomputes activations in the
        backward pass, `"reversible"` also those of blocks in eval(), and `"stored"` stores them,
        see `ReversibleSequence`. A model in eval() stores activations.

    Raises
    ------
    TypeError
        If an option has the wrong type.
    ValueError
        If an option is not valid. The model checks whether layers fit each other.

    Examples
    --------
    >>> from multibn.torch.reversible import RevMViTConfig
    >>> cfg = {"MODEL": {"NUM_CLASSES": 10}, "MVIT": {"DEPTH": 4, "REV": {"ENABLE": True}}}
    >>> config = RevMViTConfig.from_slowfast(cfg)
    >>> config.num_classes, config.depth, config.embed_dim
    (10, 4, 96)
    """

    crop_size: int = _key("DATA.TRAIN_CROP_SIZE", 224)
    num_frames: int = _key("DATA.NUM_FRAMES", 8)
    in_channels: int = _key("DATA.INPUT_CHANNEL_NUM", 3)
    num_classes: int = _key("MODEL.NUM_CLASSES", 400)
    head_dropout_rate: float = _key("MODEL.DROPOUT_RATE", 0.5)
    head_act: Literal["softmax", "sigmoid", "none"] = _key("MODEL.HEAD_ACT", "softmax")
    detach_final_fc: bool = _key("MODEL.DETACH_FINAL_FC", False)
    pool_mode: PoolMode = _key("MVIT.MODE", "conv")  # noqa: RUF009
    pool_first: bool = _key("MVIT.POOL_FIRST", False)
    patch_2d: bool = _key("MVIT.PATCH_2D", False)
    patch_kernel: Sequence[int] = _key("MVIT.PATCH_KERNEL", (3, 7, 7))
    patch_stride: Sequence[int] = _key("MVIT.PATCH_STRIDE", (2, 4, 4))
    patch_padding: Sequence[int] = _key("MVIT.PATCH_PADDING", (2, 4, 4))
    embed_dim: int = _key("MVIT.EMBED_DIM", 96)
    num_heads: int = _key("MVIT.NUM_HEADS", 1)
    depth: int = _key("MVIT.DEPTH", 16)
    mlp_ratio: float = _key("MVIT.MLP_RATIO", 4.0)
    qkv_bias: bool = _key("MVIT.QKV_BIAS", True)
    dim_mul: Sequence[Sequence[float]] = _key("MVIT.DIM_MUL", ())
    head_mul: Sequence[Sequence[float]] = _key("MVIT.HEAD_MUL", ())
    pool_q_stride: Sequence[Sequence[int]] = _key("MVIT.POOL_Q_STRIDE", ())
    pool_kv_stride: Sequence[Sequence[int]] = _key("MVIT.POOL_KV_STRIDE", ())
    pool_kv_stride_adaptive: Sequence[int] | None = _key("MVIT.POOL_KV_STRIDE_ADAPTIVE", None)
    pool_kvq_kernel: Sequence[int] | None = _key("MVIT.POOL_KVQ_KERNEL", None)
    separate_qkv: bool = _key("MVIT.SEPARATE_QKV", False)
    residual_pooling: bool = _key("MVIT.RESIDUAL_POOLING", False)
    rel_pos_spatial: bool = _key("MVIT.REL_POS_SPATIAL", False)
    rel_pos_temporal: bool = _key("MVIT.REL_POS_TEMPORAL", False)
    rel_pos_zero_init: bool = _key("MVIT.REL_POS_ZERO_INIT", False)
    use_abs_pos: bool = _key("MVIT.USE_ABS_POS", True)
    sep_pos_embed: bool = _key("MVIT.SEP_POS_EMBED", False)
    use_fixed_sincos_pos: bool = _key("MVIT.USE_FIXED_SINCOS_POS", False)
    norm: str | NormFactory = _key("MVIT.NORM", "layernorm")  # noqa: RUF009
    norm_stem: bool = _key("MVIT.NORM_STEM", False)
    use_mean_pooling: bool = _key("MVIT.USE_MEAN_POOLING", False)
    dropout_rate: float = _key("MVIT.DROPOUT_RATE", 0.0)
    droppath_rate: float = _key("MVIT.DROPPATH_RATE", 0.1)
    head_init_scale: float = _key("MVIT.HEAD_INIT_SCALE", 1.0)
    zero_decay_pos_cls: bool = _key("MVIT.ZERO_DECAY_POS_CLS", True)
    respath_fuse: str = _key("MVIT.REV.RESPATH_FUSE", "concat")
    pre_q_fusion: str = _key("MVIT.REV.PRE_Q_FUSION", "avg")
    buffer_layers: Sequence[int] = _key("MVIT.REV.BUFFER_LAYERS", ())
    drop_path_mode: DropPathMode = "residual_branch"
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = _as_tuple(getattr(self, name))
            object.__setattr__(self, name, value)
            if get_origin(hint) is Literal:
                check_choice(name, value, hint)
            elif hint is bool:
                check_bool(**{name: value})
            elif hint is int:
                check_int(name, value)
            elif hint is float:
                check_number(name, value, _INTERVALS.get(name, "[0, 1)"))
            elif get_origin(hint) is Sequence and not isinstance(value, tuple):
                raise TypeError(f"`{name}` must be a sequence: got {value!r}.")
        is_norm = isinstance(self.norm, type) and issubclass(self.norm, _NormBase)  # takes no role
        if is_norm or not (callable(self.norm) or self.norm in _NORMS):
            raise ValueError(
                f"`norm` must be one of {', '.join(map(repr, _NORMS))} or a function (dim, role) "
                f"-> nn.Module: got {self.norm!r}. Pass other batch norms as a function: "
                "norm=lambda dim, role: SubBatchNorm1d(4, dim)."
            )
        parse_fusion("respath_fuse", self.respath_fuse)
        parse_fusion("pre_q_fusion", self.pre_q_fusion)
        axes = 2 if self.patch_2d else 3
        words = f"hold {axes} numbers with patch_2d={self.patch_2d}"
        for name, least in (("patch_kernel", 1), ("patch_stride", 1), ("patch_padding", 0)):
            value = getattr(self, name)
            _check_length(name, value, axes, words)
            check_ints(name, value, least)
        for name in ("pool_kv_stride_adaptive", "pool_kvq_kernel"):
            if value := getattr(self, name):
                _check_length(name, value, 3, "hold three numbers, (T, H, W)")
                check_ints(name, value)
        for layer in self.buffer_layers:
            self._check_layer("buffer_layers", layer)
        for name in ("pool_q_stride", "pool_kv_stride"):
            for entry in getattr(self, name):
                _check_length(name, entry, 4, "list (layer, T, H, W)")
                self._check_layer(name, entry[0])
                check_ints(name, entry[1:])
        for name in ("dim_mul", "head_mul"):
            for entry in getattr(self, name):
                _check_length(name, entry, 2, "list (layer, factor)")
                self._check_layer(name, entry[0])
                check_number(name, entry[1], "(0, inf)")

    def _check_layer(self, name: str, layer: Any) -> None:
        check_int(name, layer, 0)
        if layer >= self.depth:
            raise ValueError(f"`{name}` must name layers from 0 to {self.depth - 1}: got {layer}.")

    def make_norm(self, dim: int, role: Role) -> nn.Module:
        """Return a new norm of `dim` channels for this role."""
        make = self.norm if callable(self.norm) else _NORMS[self.norm]
        return make(dim, role)

    @classmethod
    def from_slowfast(cls, cfg: Any, **options: Any) -> "RevMViTConfig":
        """Read the options from one of SlowFast's configs.

        The model reproduces SlowFast's results except for stochastic depth; for that, set
        `drop_path_mode="whole"`.

        Parameters
        ----------
        cfg
            Path of a yaml file (needs PyYAML), or the config as a dict, a yacs CfgNode or an
            OmegaConf config. Missing keys have SlowFast's defaults. Keys outside MVIT that do not
            affect the model are ignored. A `RevMViTConfig` is accepted, too.
        **options
            Fields that replace those of `cfg`.

        Raises
        ------
        ValueError
            If MVIT has an unknown key, MVIT.REV.ENABLE is not True, MVIT.REV.RES_PATH is not
            "conv", DETECTION.ENABLE is True, or an option is not valid.

        Warns
        -----
        UserWarning
            If MVIT.CLS_EMBED_ON is True, which is ignored: the model has no cls token.
        """
        if isinstance(cfg, cls):
            return replace(cfg, **options)
        if isinstance(cfg, str | Path):
            import yaml  # an optional dependency

            cfg = yaml.safe_load(Path(cfg).read_text(encoding="utf-8"))
        values = _flatten({section: cfg[section] for section in _SECTIONS if section in cfg})
        keys = {f.metadata["key"]: f.name for f in fields(cls) if f.metadata}
        known = {*keys, *_FIXED, *_UNREAD}
        unknown = [key for key in values if key.startswith("MVIT.") and key not in known]
        if unknown:
            raise ValueError(f"`cfg` has unknown MVIT keys: {', '.join(unknown)}.")
        for key, (wanted, default, why) in _FIXED.items():
            if (got := values.get(key, default)) != wanted:
                raise ValueError(f"`cfg.{key}` must be {wanted!r}: got {got!r}; {why}.")
        if values.get("MVIT.CLS_EMBED_ON"):
            warn("`cfg.MVIT.CLS_EMBED_ON` is ignored: reversible models have no cls token.")
        read = {name: values[key] for key, name in keys.items() if key in values}
        if isinstance(channels := read.get("in_channels"), Sequence):  # a number for each pathway
            read["in_channels"] = channels[0]
        return cls(**(read | options))


def parse_fusion(name: str, mode: str) -> tuple[float, float] | None:
    """Return width factor and dropout rate of the MLP; None for modes without an MLP.

    `name` is the argument's name in errors.
    """
    if mode in ("add", "avg", "max", "min", "concat"):
        return None
    numbers = _FUSION_LINEAR.fullmatch(mode) if isinstance(mode, str) else None
    if numbers is None:
        raise ValueError(
            f"`{name}` must be 'add', 'avg', 'max', 'min', 'concat' or "
            f"'[ln+]concat_linear[_WIDTH[_DROPOUT]]': got {mode!r}."
        )
    return float(numbers[3] or 1), float(numbers[5] or 0)


def _check_length(name: str, value: Any, length: int, words: str) -> None:
    if not isinstance(value, tuple) or len(value) != length:
        raise ValueError(f"`{name}` must {words}: got {value!r}.")


def _as_tuple(value: Any) -> Any:
    """Return `value` with lists converted to tuples, nested ones too."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_as_tuple, value))
    return value


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the config as one dict with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            leaves |= _flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = _literal(value)
    return leaves


def _literal(value: Any) -> Any:
    """Parse a string as yacs does: yaml reads `(3, 7, 7)` as a string."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value
