"""Every model file of timm: what is converted, and what comes back."""

from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn.torch_backend import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from tests.programs.row import Row

MODELS_PER_FILE = 3
AT_LEAST = 50  # files with batch norm; timm has more


def every_file_of_timm() -> Row:
    """Convert and revert models of each file. Collective: each rank takes some of the files."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts: dict[str, list[int]] = {}
    complaints: list[str] = []
    for file in sorted(timm.list_modules())[rank::size]:
        for name in _some(timm.list_models(module=file)):
            try:
                with torch.device("meta"):
                    model = timm.create_model(name)
                if count := sum(isinstance(m, _BatchNorm) for m in model.modules()):
                    counts.setdefault(file, []).append(count)
                    there_and_back(model)
            except Exception as error:
                complaints.append(f"{file}, {name}: {error!r}")
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, (counts, complaints))
    counts = {file: n for part, _ in parts for file, n in part.items()}
    complaints = [text for _, texts in parts for text in texts]
    if len(counts) < AT_LEAST:
        complaints.append(f"only {len(counts)} files with batch norm")
    num_models = sum(map(len, counts.values()))
    return Row(
        "timm",
        f"every model file with batch norm: {len(counts)} files, {num_models} models, at most "
        f"{MODELS_PER_FILE} of a file; conversion and back",
        f"0 of {sum(map(sum, counts.values()))} layers left; classes and attributes come back",
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
    """Of each layer, by identity: parameters and buffers among them."""
    return {
        f"{path}.{name}": {k: id(v) for k, v in value.items()}
        if isinstance(value, dict)
        else id(value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
    }
