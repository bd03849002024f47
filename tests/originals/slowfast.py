"""SlowFast's training in small: its model, the tools that it calls, and the order of its calls.

fvcore is the real package. SlowFast cannot be installed, and the pytorchvideo of the package index
is older than the layers that SlowFast takes from there: what their functions do is written here
anew. Names of files and lines are SlowFast's at commit 287ec007, unless a name says pytorchvideo,
which is at commit f3142bb0.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multibn.torch_backend import SubBatchNorm3d
from tests.helpers import slowfast
from tests.helpers.fvcore import differentiable_all_reduce, get_bn_modules, update_bn_stats

C = 4
Batch: TypeAlias = tuple[Tensor, Tensor]


class NaiveSyncBatchNorm3d(nn.BatchNorm3d):
    """pytorchvideo/layers/batch_norm.py: ranks count alike, and the variance stays biased.

    For groups of one rank or of all ranks, which are all the groups of two ranks.
    """

    def __init__(
        self, num_sync_devices: int | None = None, global_sync: bool = True, **options: Any
    ) -> None:
        super().__init__(**options)
        self.is_alone = not global_sync and num_sync_devices == 1

    def forward(self, input: Tensor) -> Tensor:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1 or not self.training:
            return super().forward(input)
        moments = torch.stack([input.mean((0, 2, 3, 4)), input.square().mean((0, 2, 3, 4))])
        if not self.is_alone:
            moments = differentiable_all_reduce(moments) / world_size
        mean, var = moments[0], moments[1] - moments[0].square()
        for running, value in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            assert self.momentum is not None
            running += self.momentum * (value.detach() - running)
        shape = (1, -1, 1, 1, 1)
        scale = self.weight * (var + self.eps).rsqrt()
        return input * scale.view(shape) + (self.bias - mean * scale).view(shape)


def get_norm(cfg: Any) -> Callable[..., nn.Module]:
    """slowfast/models/batchnorm_helper.py:16."""
    bn = cfg["BN"]
    match bn["NORM_TYPE"]:
        case "batchnorm" | "sync_batchnorm_apex":
            return nn.BatchNorm3d
        case "sub_batchnorm":
            return partial(slowfast.SubBatchNorm, nn.BatchNorm3d, bn["NUM_SPLITS"])
        case "sync_batchnorm":
            options = {"num_sync_devices": bn["NUM_SYNC_DEVICES"], "global_sync": bn["GLOBAL_SYNC"]}
            return partial(NaiveSyncBatchNorm3d, **options)
        case other:
            raise NotImplementedError(other)


class Net(nn.Module):
    """A residual block and a head, with names and marks as slowfast/models/resnet_helper.py has."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, C, 3, padding=1, bias=False)
        self.stem_bn = norm(num_features=C, eps=1e-5, momentum=0.1)
        self.a = nn.Conv3d(C, C, 3, padding=1, bias=False)
        self.a_bn = norm(num_features=C, eps=1e-5, momentum=0.1)
        self.a_bn.transform_final_bn = True  # type: ignore[assignment]
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_bn(self.stem(x)).relu()
        x = (x + self.a_bn(self.a(x))).relu()
        return self.head(x.mean((2, 3, 4)))


def init_weights(model: nn.Module, zero_init_final_bn: bool) -> None:
    """The batch norms in slowfast/utils/weight_init_helper.py:10."""
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and m.affine:
            is_final = getattr(m, "transform_final_bn", False)
            nn.init.constant_(m.weight, 0.0 if is_final and zero_init_final_bn else 1.0)
            nn.init.zeros_(m.bias)


def frozen_bn_stats(model: nn.Module) -> None:
    """slowfast/utils/misc.py:361."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm3d):
            m.eval()


def aggregate_sub_bn_stats(module: nn.Module) -> int:
    """slowfast/utils/misc.py:372; returns the number of layers."""
    layers = [m for m in module.modules() if isinstance(m, (SubBatchNorm3d, slowfast.SubBatchNorm))]
    for layer in layers:
        layer.aggregate_stats()
    return len(layers)


def sub_to_normal_bn(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """slowfast/utils/checkpoint.py:526, which every saved checkpoint goes through."""
    names = {k: k.replace("bn.bn.", "bn.") for k in state if ".split_bn." not in k}
    return {new: state[old].clone() for old, new in names.items()}


def precise_bn(model: nn.Module, batches: Sequence[Batch]) -> int:
    """tools/train_net.py:699, before every evaluation; returns the number of layers found."""
    found = len(get_bn_modules(model))
    if found:
        update_bn_stats(model, (x for x, _ in batches), len(batches))
    return found


def train(model: nn.Module, epochs: Iterable[Sequence[Batch]], *, frozen: bool = False) -> Any:
    """tools/train_net.py: losses, what the tools found, and evaluated logits of every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for batches in epochs:
        model.train()  # :70
        if frozen:
            frozen_bn_stats(model)
        for x, target in batches:
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        counts = [precise_bn(model, batches), aggregate_sub_bn_stats(model)]  # :702, :710
        seen.append(torch.tensor(counts))
        model.eval()
        with torch.no_grad():
            seen += [model(x) for x, _ in batches]
    return seen


def data(rank: int = 0, *, epochs: int = 2, steps: int = 3) -> list[list[Batch]]:
    """Batches of 4 films, float64, with unlike means of the even and the odd ones."""
    generator = torch.Generator().manual_seed(rank)

    def batch() -> Batch:
        x = torch.randn(4, 2, 2, 5, 5, generator=generator, dtype=torch.float64)
        x += torch.arange(4).view(4, 1, 1, 1, 1) % 2
        return x, torch.randint(3, (4,), generator=generator)

    return [[batch() for _ in range(steps)] for _ in range(epochs)]


def pair(theirs: Callable[..., nn.Module], ours: Callable[..., nn.Module]) -> tuple[Net, Net]:
    """Two equal models in float64 whose norms are made by the two functions."""
    models = []
    for norm in (theirs, ours):
        torch.manual_seed(0)
        model = Net(norm).double()
        init_weights(model, zero_init_final_bn=False)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict(), strict=True)
    return models[0], models[1]
