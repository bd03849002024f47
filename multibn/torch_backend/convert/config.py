"""The normalization layer that a PySlowFast config names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from multibn.torch_backend.layer import modules, naive, sub_batch_norm

_TYPES = "'batchnorm', 'sub_batchnorm', 'sync_batchnorm' or 'sync_batchnorm_apex'"


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
        return _of_dim(nn, "BatchNorm", dim)
    if norm_type == "sub_batchnorm":
        splits = _get(bn, "NUM_SPLITS", 1)
        return partial(_of_dim(sub_batch_norm, "SubBatchNorm", dim), num_splits=splits)
    devices = _get(bn, "NUM_SYNC_DEVICES", 1)
    if norm_type == "sync_batchnorm":
        layer = _of_dim(naive, "NaiveSyncBatchNorm", dim)
        everywhere = _get(bn, "GLOBAL_SYNC", False)
        return partial(layer, num_sync_devices=devices, global_sync=everywhere)
    if norm_type == "sync_batchnorm_apex":
        return partial(_of_dim(modules, "SyncBatchNorm", dim), process_group=devices or None)
    raise NotImplementedError(f"`cfg.BN.NORM_TYPE` must be one of {_TYPES}: got {norm_type!r}.")


def _of_dim(module: Any, name: str, dim: int) -> Callable[..., nn.Module]:
    layer: Callable[..., nn.Module] = getattr(module, f"{name}{dim}d")
    return layer


def _get(node: Any, key: str, default: Any) -> Any:
    if isinstance(node, Mapping):  # the nodes of yacs and OmegaConf are mappings
        return node.get(key, default)
    return getattr(node, key, default)
