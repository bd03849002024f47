"""Small reversible MViTs, and the numbers of the original for some."""

import json
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from multibn.torch_backend.reversible import RevMViT, RevMViTConfig
from tests.helpers.launch import ROOT

DATA = ROOT / "tests" / "data"
# SlowFast at commit 287ec007, unmodified, in float64 and in training, without dropout: logits,
# gradients, and names and shapes of the state, for weights and inputs that formulas give.
REFERENCE: dict[str, Any] = json.loads((DATA / "reversible_mvit_reference.json").read_text())
# The same models in evaluation: probabilities, the gradient of `reference_loss` for the input, the
# gradients of its square (a gradient penalty), and fvcore's counts by SlowFast's get_model_stats.
# Then three steps of training with SlowFast's AdamW, and the probabilities after them.
EVALUATION: dict[str, Any] = json.loads((DATA / "reversible_mvit_evaluation.json").read_text())

SMALL: dict[str, Any] = {
    "crop_size": 32,
    "num_frames": 1,
    "num_classes": 10,
    "head_dropout_rate": 0.0,
    "droppath_rate": 0.0,
    "patch_2d": True,
    "patch_kernel": (7, 7),
    "patch_stride": (4, 4),
    "patch_padding": (3, 3),
    "embed_dim": 16,
    "depth": 5,
    "dim_mul": ((1, 2.0), (3, 2.0)),
    "head_mul": ((1, 2.0), (3, 2.0)),
    "pool_q_stride": ((1, 1, 2, 2), (3, 1, 2, 2)),
    "pool_kv_stride_adaptive": (1, 4, 4),
    "pool_kvq_kernel": (1, 3, 3),
    "buffer_layers": (1, 3),
}
VIDEO: dict[str, Any] = {
    "num_frames": 4,
    "patch_2d": False,
    "patch_kernel": (3, 7, 7),
    "patch_stride": (2, 4, 4),
    "patch_padding": (1, 3, 3),
    "pool_kvq_kernel": (3, 3, 3),
}


def small(**options: Any) -> RevMViT:
    """A model of five layers, two of them transitions, in float64, always of the same weights."""
    torch.manual_seed(0)
    model = RevMViT(RevMViTConfig(**{**SMALL, **options}))
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


def images(count: int = 4, size: int = 32) -> Tensor:
    return torch.randn(
        count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def slowfast_config(case: dict[str, Any]) -> dict[str, Any]:
    """What the model of a reference case was made of, as SlowFast writes it."""
    mvit = dict(case["config"])
    crop, frames, classes = (mvit.pop(key) for key in ("CROP", "FRAMES", "NUM_CLASSES"))
    data = {"TRAIN_CROP_SIZE": crop, "NUM_FRAMES": frames, "INPUT_CHANNEL_NUM": [3]}
    return {
        "MVIT": mvit,
        "DATA": data,
        "MODEL": {"NUM_CLASSES": classes, "DROPOUT_RATE": 0.0},
        "BN": {"NORM_TYPE": "batchnorm"},
    }


def reference_case(name: str) -> dict[str, Any]:
    """SlowFast's config of a model of `EVALUATION`, which has one more than `REFERENCE`."""
    cfg = slowfast_config(REFERENCE.get(name, REFERENCE["rev_mvit"]))
    cfg["MVIT"] |= EVALUATION[name].get("config", {})
    return cfg


def reference_model(name: str, **options: Any) -> RevMViT:
    """The model of `reference_case(name)`, with the reference's weights."""
    model = RevMViT.from_config(reference_case(name), **options).double()
    weights = {key: reference_weight(key, tuple(t.shape)) for key, t in model.state_dict().items()}
    model.load_state_dict(weights)
    return model


def reference_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    seed = zlib.crc32(name.encode()) % 9973
    t = torch.arange(math.prod(shape), dtype=torch.float64)
    values = torch.sin(t * (0.37 + (seed % 17) * 0.05) + seed) * 0.15
    if name.endswith("weight") and "norm" in name.rsplit(".", 2)[-2]:
        values = 1 + values
    return values.reshape(shape)


def reference_input(patch_2d: bool) -> Tensor:
    shape = (2, 3, 32, 32) if patch_2d else (2, 3, 4, 32, 32)
    t = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(t * 0.113) + torch.cos(t * 0.0171)).reshape(shape).requires_grad_()


def reference_loss(logits: Tensor) -> Tensor:
    upstream = torch.cos(torch.arange(20, dtype=torch.float64) * 1.3).reshape(2, 10)
    return (logits * upstream).sum()
