"""The normalization layer that a PySlowFast config names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from multibn.torch_backend.layer.modules import SyncBatchNorm3d
from multibn.torch_backend.layer.naive import NaiveSyncBatchNorm3d
from multibn.torch_backend.layer.sub_batch_norm import SubBatchNorm3d


def get_norm(cfg: Any) -> Callable[..., nn.Module]:
    """Return a constructor of the layer that `cfg.BN` names. Replaces PySlowFast's `get_norm`.

    `cfg.BN.NORM_TYPE` is one of

    - `"batchnorm"`: nn.BatchNorm3d;
    - `"sub_batchnorm"`: SubBatchNorm3d with `num_splits=NUM_SPLITS`;
    - `"sync_batchnorm"`: NaiveSyncBatchNorm3d with `num_sync_devices=NUM_SYNC_DEVICES` and
      `global_sync=GLOBAL_SYNC`; if GLOBAL_SYNC is true, NUM_SYNC_DEVICES is ignored;
    - `"sync_batchnorm_apex"`: SyncBatchNorm3d over NUM_SYNC_DEVICES consecutive ranks, 0 for all.
      It replaces apex's layer, which no longer exists.

    PySlowFast's tools look for nn.BatchNorm1d, 2d and 3d, to initialize and to freeze layers. A
    sub-batch norm contains two of them; the other layers are subclasses. Call the result with
    `num_features` by name, as PySlowFast does: the classes differ in their first positional
    argument.

    Parameters
    ----------
    cfg
        A mapping (a dict, a yacs CfgNode, an OmegaConf config) or an object with attributes (an
        argparse.Namespace, a dataclass), with a node BN of any of these types. Only NORM_TYPE is
        required. The defaults of the other entries are PySlowFast's: NUM_SPLITS 1, NUM_SYNC_DEVICES
        1, GLOBAL_SYNC False.

    Raises
    ------
    NotImplementedError
        If BN.NORM_TYPE is missing or none of the four, as in PySlowFast.

    Examples
    --------
    >>> from multibn.torch import get_norm
    >>> cfg = {"BN": {"NORM_TYPE": "sub_batchnorm", "NUM_SPLITS": 4}}
    >>> layer = get_norm(cfg)(num_features=16)
    >>> type(layer).__name__, layer.num_splits
    ('SubBatchNorm3d', 4)
    """
    bn = _entry(cfg, "BN", None)
    devices = _entry(bn, "NUM_SYNC_DEVICES", 1)
    options = {"num_sync_devices": devices, "global_sync": _entry(bn, "GLOBAL_SYNC", False)}
    layers: dict[Any, Callable[..., nn.Module]] = {
        "batchnorm": nn.BatchNorm3d,
        "sub_batchnorm": partial(SubBatchNorm3d, num_splits=_entry(bn, "NUM_SPLITS", 1)),
        "sync_batchnorm": partial(NaiveSyncBatchNorm3d, **options),
        "sync_batchnorm_apex": partial(SyncBatchNorm3d, process_group=devices or None),
    }
    norm_type = _entry(bn, "NORM_TYPE", None)
    if not isinstance(norm_type, str) or norm_type not in layers:
        raise NotImplementedError(
            f"`cfg.BN.NORM_TYPE` must be one of {', '.join(map(repr, layers))}: got {norm_type!r}."
        )
    return layers[norm_type]


def _entry(node: Any, name: str, default: Any) -> Any:
    """Return an entry of a mapping, or an attribute of another object."""
    return node.get(name, default) if isinstance(node, Mapping) else getattr(node, name, default)
