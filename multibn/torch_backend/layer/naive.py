"""Grouped synchronization under the names of detectron2, PySlowFast, pytorchvideo and TimeSformer.

The "naive" layers of these libraries average the ranks' means and means of squares in float32 and
store the biased variance. Here the statistics are exact. `weighting="rank", running_var="biased"`
gives the numbers of the naive layers.
"""

from typing import Any

from multibn._typing import check_bool, check_int
from multibn.communicators import CommunicatorLike, Group, as_communicator
from multibn.torch_backend.layer import modules


class _NaiveSyncBatchNorm(modules.SyncBatchNorm):
    def __init__(
        self,
        num_sync_devices: int | None = None,
        global_sync: bool | None = None,
        *,
        num_features: int,
        process_group: CommunicatorLike = None,
        **bn_args: Any,
    ) -> None:
        group = as_communicator(process_group)
        if global_sync is None:
            global_sync = num_sync_devices is None
        check_bool(global_sync=global_sync)
        if not global_sync:
            check_int("num_sync_devices", num_sync_devices, None, none="all ranks of the machine")
            group = Group(group, "machine")
            if num_sync_devices is not None and num_sync_devices > 0:
                group = Group(group, num_sync_devices)
        super().__init__(num_features, process_group=group, **bn_args)

    @property
    def global_sync(self) -> bool:
        """Whether the layer shares statistics with the ranks of all machines."""
        return not isinstance(self.layer_communicator.communicator, Group)

    @property
    def num_sync_devices(self) -> int:
        """The number of ranks in a group, or on the machine if `global_sync` is true."""
        group = self.layer_communicator.communicator
        return (Group(group, "machine") if self.global_sync else group).size

    @property
    def num_groups(self) -> int:
        """The number of groups on the machine."""
        group = self.layer_communicator.communicator
        if isinstance(group, Group) and group.spec != "machine":
            return group.parent.size // group.size
        return 1


class NaiveSyncBatchNorm1d(_NaiveSyncBatchNorm, modules.SyncBatchNorm1d):
    """Batch normalization of `(N, C)` or `(N, C, L)` over groups of ranks inside a machine.

    A `SyncBatchNorm` with PySlowFast's constructor signature. Like PySlowFast's layer, it is an
    nn.BatchNorm1d, so that tools which look for this class find it. `revert_sync_batchnorm` turns
    the layer into a plain nn.BatchNorm1d. Calls are collective within the group, as for
    `SyncBatchNorm`. The first training step forms the groups: it is collective over all ranks of
    `process_group`.

    Parameters
    ----------
    num_sync_devices
        Number of consecutive ranks in a group, a divisor of the number of ranks on the machine.
        0 or less: all ranks of the machine.
    global_sync
        True: share statistics with all ranks of all machines, whatever `num_sync_devices` is.
        False: share within a group on the machine; `num_sync_devices=None` then means 0. None, as
        in pytorchvideo: True unless `num_sync_devices` is an int.
    process_group
        The ranks that are divided into groups, as in `SyncBatchNorm`. For groups of other ranks,
        use a `SyncBatchNorm` with a `multibn.Group`.
    num_features, **bn_args
        As `SyncBatchNorm`, with its defaults: the statistics of the group's concatenated batch.
        `weighting="rank", running_var="biased"` gives the numbers of PySlowFast, TimeSformer and
        detectron2.

    Attributes
    ----------
    global_sync, num_sync_devices, num_groups
        As PySlowFast's: whether the layer shares with all machines, the number of ranks in a group,
        and the number of groups on the machine. The first read forms the groups.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `SyncBatchNorm`. TypeError if `num_sync_devices` is neither an int nor None. ValueError
        in the first training step if `num_sync_devices` does not divide the number of ranks on the
        machine, and in each call if the input has a wrong number of dimensions.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import NaiveSyncBatchNorm1d
    >>> layer = NaiveSyncBatchNorm1d(num_sync_devices=0, num_features=16)  # all ranks of a machine
    >>> layer(torch.randn(4, 16)).shape
    torch.Size([4, 16])
    """


class NaiveSyncBatchNorm2d(_NaiveSyncBatchNorm, modules.SyncBatchNorm2d):
    """The layer of inputs `(N, C, H, W)`. Parameters are those of `NaiveSyncBatchNorm1d`.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import NaiveSyncBatchNorm2d
    >>> layer = NaiveSyncBatchNorm2d(global_sync=True, num_features=3)  # all ranks
    >>> y = layer(torch.ones(2, 3, 4, 4))
    >>> layer.running_mean
    tensor([0.1000, 0.1000, 0.1000])
    """


class NaiveSyncBatchNorm3d(_NaiveSyncBatchNorm, modules.SyncBatchNorm3d):
    """The layer of inputs `(N, C, T, H, W)`. Parameters are those of `NaiveSyncBatchNorm1d`.

    Examples
    --------
    >>> from multibn.torch import NaiveSyncBatchNorm3d
    >>> layer = NaiveSyncBatchNorm3d(num_sync_devices=4, num_features=8)  # 4 ranks of a machine
    >>> layer.process_group
    Group(Group(DefaultCommunicator(), 'machine'), 4)
    """
