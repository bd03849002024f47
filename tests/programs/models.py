"""The models that are trained: a small size of each family, without dropout."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import segmentation_models_pytorch as smp
import timm
import torchvision
import transformers
from torch import nn
from ultralytics.nn.tasks import DetectionModel


class Model(NamedTuple):
    """A model, and the shape of a sample."""

    program: str
    name: str
    build: Callable[[], nn.Module]
    shape: Sequence[int] = (3, 64, 64)


def _timm(name: str, **options: Any) -> Model:
    return Model("timm", name, partial(timm.create_model, name, **options))


def _torchvision(name: str, shape: Sequence[int] = (3, 64, 64), **options: Any) -> Model:
    build = partial(torchvision.models.get_model, name, weights=None, **options)
    return Model("torchvision", name, build, shape)


def _unet(encoder: str) -> Model:
    name = "segmentation_models_pytorch"
    return Model(name, f"Unet, {encoder}", partial(smp.Unet, encoder, encoder_weights=None))


def _transformers(name: str, model: str, config: str, **options: Any) -> Model:
    def build() -> nn.Module:
        network: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return network

    return Model("transformers", name, build)


_SIZES = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1]}

MODELS = (
    _timm("resnet18"),
    _timm("efficientnet_b0"),
    _timm("regnety_002"),
    _timm("mobilenetv3_small_100"),
    _timm("densenet121"),
    _timm("cspresnet50"),
    _timm("mobilevit_xxs"),
    _timm("levit_128s", img_size=64),
    _timm("dpn68"),
    _timm("repvgg_a0"),
    _timm("ghostnet_100"),
    _timm("fastvit_t8"),
    _unet("resnet18"),
    _unet("tu-regnety_002"),
    _unet("tu-efficientnet_b0"),
    _torchvision("resnet18"),
    _torchvision("mobilenet_v2"),
    _torchvision("regnet_y_400mf"),
    _torchvision("googlenet", init_weights=False),
    _torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None, aux_loss=True),
    _torchvision("r3d_18", (3, 4, 32, 32)),
    _transformers(
        "ResNet", "ResNetForImageClassification", "ResNetConfig", layer_type="basic", **_SIZES
    ),
    _transformers(
        "RegNet", "RegNetForImageClassification", "RegNetConfig", groups_width=8, **_SIZES
    ),
    _transformers(
        "MobileNetV2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        depth_multiplier=0.35,
    ),
    _transformers(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
    ),
    Model("ultralytics", "yolov8n", partial(DetectionModel, "yolov8n.yaml", verbose=False)),
)
