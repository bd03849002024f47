"""Convert the group and instance norms of a model to synchronized layers."""

from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from multibn._typing import Nonfinite, check_bool, list_obstacles
from multibn._warnings import warn_or_raise
from multibn.communicators import CommunicatorLike
from multibn.torch_backend.layer.base import check_module
from multibn.torch_backend.norms import instance_norm
from multibn.torch_backend.norms.group_norm import SyncGroupNorm, SyncGroupsBase

_Model = TypeVar("_Model", bound=nn.Module)
_SYNCHRONIZED: dict[type[nn.Module], type[SyncGroupsBase]] = {nn.GroupNorm: SyncGroupNorm} | {
    getattr(nn, f"InstanceNorm{n}d"): getattr(instance_norm, f"SyncInstanceNorm{n}d")
    for n in (1, 2, 3)
}


def convert_sync_groupnorm(
    module: _Model,
    process_group: CommunicatorLike = None,
    *,
    nonfinite: Nonfinite = None,
    strict: bool = False,
) -> _Model:
    """Convert every group norm and instance norm of a model, for samples split between ranks.

    Changes the layers in place and returns `module`: an nn.GroupNorm becomes a `SyncGroupNorm`, an
    nn.InstanceNorm2d a `SyncInstanceNorm2d`. `revert_sync_batchnorm` undoes it. Not collective.

    Parameters
    ----------
    module
        The model, changed in place.
    process_group, nonfinite
        As for `SyncGroupNorm`. The ranks of `process_group` have parts of the same samples.
    strict
        Raise, without changing anything, if a layer's class is a subclass of torch's, or the model
        has no group or instance norm.

    Raises
    ------
    TypeError, ValueError
        As `SyncGroupNorm`. TypeError if `module` is no module, and with `strict`, see above.

    Warns
    -----
    UserWarning
        If layers cannot be converted, because their classes are subclasses of torch's: the warning
        lists them. If the model has no group or instance norm.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import convert_sync_groupnorm
    >>> model = convert_sync_groupnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)))
    >>> type(model[1]).__name__, isinstance(model[1], nn.GroupNorm)
    ('SyncGroupNorm', True)
    """
    check_module("module", module)
    check_bool(strict=strict)
    SyncGroupNorm(1, 1, process_group=process_group, nonfinite=nonfinite)
    kinds = nn.GroupNorm, _InstanceNorm
    norms = [(path, m) for path, m in module.named_modules() if isinstance(m, kinds)]
    plain = [(path, m) for path, m in norms if not isinstance(m, SyncGroupsBase)]
    layers: list[Any] = [m for _, m in plain if type(m) in _SYNCHRONIZED]
    others = [(path, type(m).__qualname__) for path, m in plain if m not in layers]
    obstacles = {path: f"{name}: a subclass of torch's layer" for path, name in others}
    consequence = "layer(s) cannot be converted, so that each rank normalizes only its part"
    message = list_obstacles(obstacles, consequence)
    if not norms:
        message = (
            "`module` must have a group or instance norm of torch: got none in "
            f"{type(module).__qualname__}. convert_sync_batchnorm is for batch norms."
        )
    warn_or_raise(message, strict)
    for layer in layers:
        layer.__class__ = _SYNCHRONIZED[type(layer)]
        layer.configure(process_group, nonfinite=nonfinite)
    return module
