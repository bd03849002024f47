"""Rules of other people's code that look for classes of layers, on plain and converted models."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import timm
import torch
import torchvision
from lightning.pytorch.callbacks import BaseFinetuning
from timm.layers import FrozenBatchNormAct2d
from timm.optim import param_groups_weight_decay
from timm.utils import freeze, reparameterize_model, unfreeze
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops._utils import split_normalization_params
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.nn.tasks import DetectionModel

from multibn import SingleProcess
from multibn.torch_backend import convert_sync_batchnorm
from tests.helpers.fvcore import get_bn_modules, update_bn_stats
from tests.programs.row import Row

Found = tuple[Sequence[str], Sequence[Tensor]]  # names, and numbers


def build_optimizer(model: nn.Module) -> Found:
    """Each parameter, in its group."""
    trainer: Any = SimpleNamespace()
    optimizer = BaseTrainer.build_optimizer(trainer, model, name="SGD", decay=5e-4)
    groups = {id(p): g["param_group"] for g in optimizer.param_groups for p in g["params"]}
    return [name for name, p in model.named_parameters() if groups[id(p)] == "bn"], []


def freezing(model: nn.Module) -> Found:
    """Layers that are frozen; and the model's output after training goes on."""
    freeze(model, ["bn1", "layer1"] if hasattr(model, "layer1") else [])
    norms = (FrozenBatchNorm2d, FrozenBatchNormAct2d)
    frozen = [path for path, part in model.named_modules() if isinstance(part, norms)]
    return frozen, _outputs(model)


def freezing_and_back(model: nn.Module) -> Found:
    freeze(model)
    unfreeze(model)
    trained = [f"{path}: {_torchs(part)}" for path, part in model.named_modules() if _torchs(part)]
    return trained, []


def no_decay(model: nn.Module) -> Found:
    without = next(g for g in param_groups_weight_decay(model, 1e-4) if not g["weight_decay"])
    return _names(model, without["params"]), []


def split_norms(model: nn.Module) -> Found:
    return _names(model, split_normalization_params(model)[0]), []


def finetuning(model: nn.Module) -> Found:
    BaseFinetuning.freeze(model, train_bn=True)
    return [name for name, p in model.named_parameters() if p.requires_grad], []


def precise_statistics(model: nn.Module) -> Found:
    norms = [id(part) for part in get_bn_modules(model)]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, 64, 64, generator=generator).double() for _ in range(3)]
    update_bn_stats(model, batches, 3)
    paths = [path for path, part in model.named_modules() if id(part) in norms]
    return paths, [b for name, b in model.named_buffers() if "running" in name]


def fusing(model: nn.Module) -> Found:
    """ultralytics' own way into evaluation: layers that are left, and the outputs."""
    model.eval().fuse(verbose=False)  # type: ignore[operator]
    return kinds(model), [y for y in pytree.tree_leaves(model(images())) if isinstance(y, Tensor)]


def merging(model: nn.Module) -> Found:
    """timm's way from branches with batch norm to one convolution."""
    fused = reparameterize_model(model.eval())
    return kinds(fused), [fused(images())]


def features(model: nn.Module) -> Found:
    extractor = create_feature_extractor(model, ["layer1.0.bn1", "layer4"])
    outputs = [y for _ in range(2) for y in extractor(images()).values()]
    return list(extractor(images())), outputs


def _outputs(model: nn.Module) -> Sequence[Tensor]:
    model(images())
    return [model.eval()(images())]


def images() -> Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(2)).double()


def _torchs(part: nn.Module) -> str:
    """The norm of torch that a layer is an instance of, or ""."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return next((norm.__name__ for norm in norms if isinstance(part, norm)), "")


def kinds(model: nn.Module) -> Sequence[str]:
    return [f"{path}: {_torchs(p) or type(p).__name__}" for path, p in model.named_modules()]


def _names(model: nn.Module, parameters: Iterable[Tensor]) -> Sequence[str]:
    ids = {id(p) for p in parameters}
    return [name for name, p in model.named_parameters() if id(p) in ids]


def _timm(name: str) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name)


_yolo = partial(DetectionModel, "yolov8n.yaml", verbose=False)
resnet = partial(torchvision.models.resnet18, weights=None)

RULES: Sequence[tuple[str, str, Callable[[nn.Module], Found], Callable[[], nn.Module]]] = (
    ("ultralytics", "BaseTrainer.build_optimizer, yolov8n: norms' weights", build_optimizer, _yolo),
    ("timm", 'freeze(["bn1", "layer1"]), resnet18', freezing, _timm("resnet18")),
    ("timm", "freeze, efficientnet_b0", freezing, _timm("efficientnet_b0")),
    ("timm", "freeze, unfreeze, regnety_002", freezing_and_back, _timm("regnety_002")),
    ("timm", "param_groups_weight_decay, resnet18: not decayed", no_decay, _timm("resnet18")),
    ("timm", "reparameterize_model, fastvit_t8: parts afterwards", merging, _timm("fastvit_t8")),
    ("ultralytics", "fuse, yolov8n: parts afterwards", fusing, _yolo),
    ("torchvision", "split_normalization_params, resnet18", split_norms, resnet),
    ("torchvision", "create_feature_extractor, resnet18, in training: nodes", features, resnet),
    ("lightning", "BaseFinetuning.freeze, resnet18: parameters still trained", finetuning, resnet),
    ("fvcore", "get_bn_modules, update_bn_stats, resnet18", precise_statistics, resnet),
)


def found(
    program: str, tried: str, rule: Callable[[nn.Module], Found], build: Callable[[], nn.Module]
) -> Row:
    """Apply a rule to a plain and to a converted model. Not collective."""
    torch.manual_seed(0)
    plain = build().double().train()
    converted = convert_sync_batchnorm(copy.deepcopy(plain), SingleProcess(), strict=True)
    names, numbers = rule(plain)
    names_now, numbers_now = rule(converted)
    row = Row(program, tried, f"{len(names_now)} found, {len(names)} in the plain model")
    if numbers:
        pairs = zip(numbers, numbers_now, strict=True)
        row.difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
        row.judge()
    if not names or list(names_now) != list(names):
        row.complaint = row.complaint or "does not find what it found in the plain model"
    return row
