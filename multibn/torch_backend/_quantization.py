"""torch.ao.quantization.fuse_modules on converted models: torch asks a table by exact classes."""

from collections.abc import Callable

from torch import nn

from multibn.torch_backend.convert.convert import revert_sync_batchnorm
from multibn.torch_backend.layer.modules import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)

_SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def register() -> None:
    """Let torch fuse synchronized layers where it fuses the classes that they had."""
    try:
        from torch.ao.quantization.fuser_method_mappings import (
            _DEFAULT_OP_LIST_TO_FUSER_METHOD as fusers,
        )
    except ImportError:  # torchao is to take the place of torch.ao.quantization
        return
    for classes, fuse in list(fusers.items()):
        if not _SYNCHRONIZED.keys().isdisjoint(classes):
            fusers[tuple(_SYNCHRONIZED.get(part, part) for part in classes)] = _fuser(fuse)


def _fuser(fuse: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def fuse_reverted(is_qat: bool, *modules: nn.Module) -> nn.Module:
        layer = next(module for module in modules if isinstance(module, SyncBatchNorm))
        if is_qat or layer.fuse_relu:
            raise ValueError(
                "fuse_modules_qat would train with each rank's own statistics, and no fusion keeps "
                "fuse_relu=True: expected a layer in evaluation with fuse_relu=False, got "
                f"{layer}. Call revert_sync_batchnorm(model) first, or train synchronized and call "
                "fuse_modules(model.eval(), ...)"
            )
        return fuse(is_qat, *(revert_sync_batchnorm(module) for module in modules))

    return fuse_reverted
