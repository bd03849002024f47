"""`fuse_batch_norm_relu` in other people's networks: how many layers, and the same numbers."""

import copy
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm, fuse_batch_norm_relu
from tests.programs.models import MODELS, Model
from tests.programs.row import PER_RANK, Row
from tests.programs.training import prepared


class Expected(NamedTuple):
    """A network, and how many of its layers end in ReLU."""

    model: Model
    num_fused: int


def _torchvision(name: str, **options: Any) -> Model:
    build = partial(torchvision.models.get_model, name, weights=None, **options)
    return Model("torchvision", name, build)


def _slow() -> Model:
    """The slow pathway of SlowFast."""

    def build() -> nn.Module:
        from pytorchvideo.models.resnet import create_resnet

        network: nn.Module = create_resnet(model_depth=50, head=None)
        return network

    return Model("pytorchvideo", "create_resnet(model_depth=50)", build, (3, 4, 64, 64))


def _backbone(norm: type[nn.Module]) -> Model:
    """Of torchvision's detectors; detectron2 trains with frozen batch norms as well."""
    build = partial(resnet_fpn_backbone, backbone_name="resnet50", weights=None, norm_layer=norm)
    return Model("torchvision", f"detectors' resnet50, {norm.__name__}", build)


def _trained(program: str, name: str) -> Model:
    return next(m for m in MODELS if (m.program, m.name) == (program, name))


NETWORKS = (
    Expected(_torchvision("resnet50"), 49),
    Expected(_backbone(nn.BatchNorm2d), 48),
    Expected(_backbone(FrozenBatchNorm2d), 0),
    Expected(_torchvision("densenet121"), 121),
    Expected(_trained("torchvision", "googlenet"), 59),
    Expected(_torchvision("mobilenet_v3_small"), 5),
    Expected(_trained("torchvision", "regnet_y_400mf"), 49),
    Expected(_trained("timm", "resnet18"), 17),
    Expected(_trained("timm", "regnety_002"), 40),
    Expected(_trained("timm", "efficientnet_b0"), 0),
    Expected(_trained("timm", "densenet121"), 121),
    Expected(_trained("timm", "dpn68"), 72),
    Expected(_trained("transformers", "ResNet"), 11),
    Expected(_trained("transformers", "RegNet"), 16),
    Expected(_slow(), 49),
    Expected(_trained("ultralytics", "yolov8n"), 0),
)


def fused(expected: Expected) -> Row:
    """Compare a step of a converted network with a step after its fusion. Collective."""
    model = expected.model
    torch.manual_seed(0)
    converted = convert_sync_batchnorm(prepared(model.build()))
    network = copy.deepcopy(converted)
    keys = list(network.state_dict())
    fused, left = fuse_batch_norm_relu(network)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(PER_RANK, *model.shape, generator=generator).double()
    pairs = zip(_step(converted, x), _step(network, x), strict=True)
    largest = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    num_layers = sum(isinstance(m, SyncBatchNorm) for m in network.modules())
    reasons = [f"{count}: {why}" for why, count in Counter(left.values()).most_common(3)]
    row = Row(
        model.program,
        f"{model.name}, fuse_batch_norm_relu, a step",
        "; ".join([f"{len(fused)} of {num_layers} layers fused", *reasons]),
        largest.item(),
    ).judge()
    if len(fused) != expected.num_fused or keys != list(network.state_dict()):
        row.complaint = row.complaint or f"{expected.num_fused} layers were fused before"
    return row


def _step(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, gradients, and the state afterwards."""
    x = x.clone().requires_grad_()
    outputs = [y for y in pytree.tree_leaves(network(x)) if isinstance(y, Tensor)]
    sum(y.square().mean() for y in outputs if y.requires_grad).backward()  # type: ignore[union-attr]
    gradients = [t.grad for t in (x, *network.parameters()) if t.grad is not None]
    state = [t.double() for t in network.state_dict().values()]
    return [*(t.detach() for t in outputs), *gradients, *state]
