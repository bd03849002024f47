"""The normalization layer that a PySlowFast config names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from multibn.torch_backend.layer import modules, naive, sub_batch_norm


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
        A yacs CfgNode, an OmegaConf config or a dict, with a node BN of any of these kinds. Only
        NORM_TYPE is required. The other entries have PySlowFast's defaults: NUM_SPLITS 1,
        NUM_SYNC_DEVICES 1, GLOBAL_SYNC False.
    dim
        1, 2 or 3: whether the input is `(N, C, L)` (or `(N, C)`), `(N, C, H, W)` or
        `(N, C, T, H, W)`.

    Raises
    ------
    ValueError
        If `dim` is not 1, 2 or 3.
    NotImplementedError
        If BN.NORM_TYPE is missing or none of the four, as in PySlowFast.

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

    def layer(room: Any, name: str, **options: Any) -> Callable[..., nn.Module]:
        of_dim = getattr(room, f"{name}{dim}d")
        return partial(of_dim, **options) if options else of_dim

    bn = cfg.get("BN", {})
    splits, devices = bn.get("NUM_SPLITS", 1), bn.get("NUM_SYNC_DEVICES", 1)
    options = {"num_sync_devices": devices, "global_sync": bn.get("GLOBAL_SYNC", False)}
    layers = {
        "batchnorm": layer(nn, "BatchNorm"),
        "sub_batchnorm": layer(sub_batch_norm, "SubBatchNorm", num_splits=splits),
        "sync_batchnorm": layer(naive, "NaiveSyncBatchNorm", **options),
        "sync_batchnorm_apex": layer(modules, "SyncBatchNorm", process_group=devices or None),
    }
    norm_type = bn.get("NORM_TYPE")
    if norm_type not in layers:
        raise NotImplementedError(
            f"`cfg.BN.NORM_TYPE` must be one of {', '.join(map(repr, layers))}: got {norm_type!r}."
        )
    return layers[norm_type]
