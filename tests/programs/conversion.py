"""Every model file of timm, every model of torchvision: what is converted and comes back."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import timm
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from tests.programs.row import Row

MODELS_PER_FILE = 3


def every_file_of_timm() -> Row:
    """Convert and revert models of each file. Collective: each rank takes some of the files."""
    builds = {
        (file, name): partial(timm.create_model, name)
        for file in timm.list_modules()
        for name in _some(timm.list_models(module=file))
    }
    tried = f"every model file with batch norm, at most {MODELS_PER_FILE} models of a file"
    return _converted("timm", tried, builds, least=50)


def every_model_of_torchvision() -> Row:
    """Convert and revert all models. Collective: each rank takes some of the models."""
    builds = {}
    for name in torchvision.models.list_models():
        build = torchvision.models.get_model_builder(name)
        options = signature(build).parameters.keys() & {"weights", "weights_backbone"}
        builds["all", name] = partial(build, **dict.fromkeys(options))
    return _converted("torchvision", "every model with batch norm", builds, least=70)


def _converted(
    program: str,
    tried: str,
    builds: Mapping[tuple[str, str], Callable[[], nn.Module]],
    *,
    least: int,
) -> Row:
    """Models by file and name; `least` files or models must have batch norm. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts: dict[tuple[str, str], int] = {}
    complaints: list[str] = []
    not_built: list[str] = []
    for file, name in sorted(builds)[rank::size]:
        try:
            try:
                with torch.device("meta"):
                    model = builds[file, name]()
            except NotImplementedError:  # a model that reads a tensor while it is built
                not_built.append(name)
                continue
            if count := sum(isinstance(m, _BatchNorm) for m in model.modules()):
                counts[file, name] = count
                there_and_back(model)
        except Exception as error:
            complaints.append(f"{file}, {name}: {error!r}")
    shares: list[Any] = [None] * size
    dist.all_gather_object(shares, (counts, complaints, not_built))
    counts = {key: count for share in shares for key, count in share[0].items()}
    complaints = [text for share in shares for text in share[1]]
    not_built = sorted(name for share in shares for name in share[2])
    files = {file for file, _ in counts}
    if max(len(files), len(counts)) < least:
        complaints.append(f"only {len(counts)} models with batch norm")
    num_files = f"{len(files)} files, " if len(files) > 1 else ""
    what = [f"{tried}: {num_files}{len(counts)} models", "conversion and back"]
    if not_built:
        first, last = not_built[0], not_built[-1]
        what.append(f"{len(not_built)} not built without data: {first} to {last}")
    return Row(
        program,
        "; ".join(what),
        f"0 of {sum(counts.values())} layers left; classes and attributes come back",
        complaint="; ".join(complaints),
    )


def _some(names: Sequence[str]) -> Sequence[str]:
    """The first, the last and those between, evenly spread."""
    last = len(names) - 1
    places = {round(last * i / (MODELS_PER_FILE - 1)) for i in range(MODELS_PER_FILE)}
    return [names[place] for place in sorted(places)] if names else []


def there_and_back(model: nn.Module) -> None:
    """Convert and revert; raises if a layer stays as it is, or does not come back as it was."""
    before = _classes(model)
    attributes = _attributes(model)
    convert_sync_batchnorm(model, strict=True)
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            raise AssertionError(f"{path} is left")
        if not isinstance(layer, before[path]):
            raise AssertionError(f"{path} is no {before[path].__name__} now")
    revert_sync_batchnorm(model)
    if _classes(model) != before:
        raise AssertionError("classes do not come back")
    if _attributes(model) != attributes:
        raise AssertionError("attributes do not come back")


def _classes(model: nn.Module) -> Mapping[str, type]:
    return {path: type(part) for path, part in model.named_modules()}


def _attributes(model: nn.Module) -> Mapping[str, Any]:
    """The attributes of each layer, by identity: parameters and buffers among them."""
    return {
        f"{path}.{name}": {k: id(v) for k, v in value.items()}
        if isinstance(value, dict)
        else id(value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
    }
