"""The normalization layer that a PySlowFast config names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from multibn.torch_backend.layer.modules import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from multibn.torch_backend.layer.naive import (
    NaiveSyncBatchNorm1d,
    NaiveSyncBatchNorm2d,
    NaiveSyncBatchNorm3d,
)
from multibn.torch_backend.layer.sub_batch_norm import (
    SubBatchNorm1d,
    SubBatchNorm2d,
    SubBatchNorm3d,
)

_TYPES = "'batchnorm', 'sub_batchnorm', 'sync_batchnorm' or 'sync_batchnorm_apex'"

# Keys: number of spatial dimensions.
_BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_SUB_BATCH_NORM = {1: SubBatchNorm1d, 2: SubBatchNorm2d, 3: SubBatchNorm3d}
_SYNC_BATCH_NORM = {1: SyncBatchNorm1d, 2: SyncBatchNorm2d, 3: SyncBatchNorm3d}
_NAIVE_SYNC_BATCH_NORM = {1: NaiveSyncBatchNorm1d, 2: NaiveSyncBatchNorm2d, 3: NaiveSyncBatchNorm3d}


def get_norm(cfg: Any, dim: int = 3) -> Callable[..., nn.Module]:
    """The layer that `cfg.BN` names; takes the place of PySlowFast's `get_norm`.

    `cfg.BN.NORM_TYPE` is one of

    - `"batchnorm"`: nn.BatchNorm1d, 2d or 3d;
    - `"sub_batchnorm"`: SubBatchNorm1d, 2d or 3d with `num_splits=NUM_SPLITS`;
    - `"sync_batchnorm"`: NaiveSyncBatchNorm1d, 2d or 3d with `global_sync=GLOBAL_SYNC`, which wins,
      and `num_sync_devices=NUM_SYNC_DEVICES`;
    - `"sync_batchnorm_apex"`: SyncBatchNorm1d, 2d or 3d over NUM_SYNC_DEVICES consecutive ranks, 0
      for all, in the place of apex's layer, which no longer exists.

    PySlowFast's tools look for nn.BatchNorm1d, 2d and 3d, to initialize and to freeze layers. A
    sub-batch norm consists of two of them, and each of the other layers is one. Call the result
    with `num_features` by name, as PySlowFast does: the classes differ in their first positional
    argument.

    Parameters
    ----------
    cfg
        A yacs CfgNode, an OmegaConf config, a dict, or an object with attributes (a dataclass),
        with a node BN of any of these kinds. Only NORM_TYPE is required. The other entries have
        PySlowFast's defaults: NUM_SPLITS 1, NUM_SYNC_DEVICES 1, GLOBAL_SYNC False.
    dim
        1, 2 or 3: whether the input is `(N, C, L)` (or `(N, C)`), `(N, C, H, W)` or
        `(N, C, T, H, W)`.

    Raises
    ------
    ValueError
        If `cfg` lacks BN or BN.NORM_TYPE, or `dim` is not 1, 2 or 3.
    NotImplementedError
        If NORM_TYPE is none of the four, as in PySlowFast.

    Examples
    --------
    >>> from multibn.torch_backend import get_norm
    >>> cfg = {"BN": {"NORM_TYPE": "sub_batchnorm", "NUM_SPLITS": 4}}
    >>> layer = get_norm(cfg)(num_features=16)
    >>> type(layer).__name__, layer.num_splits
    ('SubBatchNorm3d', 4)
    """
    if isinstance(dim, bool) or dim not in (1, 2, 3):
        raise ValueError(f"`dim` must be 1, 2 or 3: got {dim!r}.")
    bn = _get(cfg, "BN", None)
    norm_type = None if bn is None else _get(bn, "NORM_TYPE", None)
    if norm_type is None:
        missing = "BN" if bn is None else "BN.NORM_TYPE"
        raise ValueError(f"`cfg` must have {missing}: got {cfg!r}. Set BN.NORM_TYPE to {_TYPES}.")
    if norm_type == "batchnorm":
        return _BATCH_NORM[dim]
    if norm_type == "sub_batchnorm":
        return partial(_SUB_BATCH_NORM[dim], num_splits=_get(bn, "NUM_SPLITS", 1))
    if norm_type == "sync_batchnorm":
        return partial(
            _NAIVE_SYNC_BATCH_NORM[dim],
            num_sync_devices=_get(bn, "NUM_SYNC_DEVICES", 1),
            global_sync=_get(bn, "GLOBAL_SYNC", False),
        )
    if norm_type == "sync_batchnorm_apex":
        return partial(_SYNC_BATCH_NORM[dim], process_group=_get(bn, "NUM_SYNC_DEVICES", 1) or None)
    raise NotImplementedError(f"`cfg.BN.NORM_TYPE` must be one of {_TYPES}: got {norm_type!r}.")


def _get(node: Any, key: str, default: Any) -> Any:
    if isinstance(node, Mapping):  # the nodes of yacs and OmegaConf are mappings
        return node.get(key, default)
    return getattr(node, key, default)
