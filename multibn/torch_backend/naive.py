"""Grouped synchronization under the names of detectron2, PySlowFast, pytorchvideo and TimeSformer.

Their layers average the ranks' means and means of squares in float32 and keep the biased variance;
"naive" is what they call that. Here the statistics are exact, and `weighting="rank"` with
`running_var="biased"` gives their numbers.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from multibn import statistics
from multibn.communicators import Communicator, Group, SingleProcess, as_communicator
from multibn.torch_backend.modules import SyncBatchNorm


class _NaiveSyncBatchNorm(SyncBatchNorm):
    # Number of dimensions of the input, each with its name in the error message.
    _shapes: ClassVar[dict[int, str]]

    def __init__(
        self,
        num_sync_devices: int | None = None,
        global_sync: bool = False,
        *,
        num_features: int,
        process_group: Any = None,
        **bn_args: Any,
    ) -> None:
        everyone = as_communicator(process_group)
        group = everyone if global_sync else _inside_machine(everyone, num_sync_devices)
        super().__init__(num_features, process_group=group, **bn_args)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        return super().forward(input, residual)

    def _check_input_dim(self, input: Tensor) -> None:
        if not isinstance(input, Tensor) or input.ndim in self._shapes:
            return  # what is no tensor is refused by `forward`
        communicator = self._communicator if self.training else SingleProcess()
        statistics.refuse(communicator, self.num_features, like=input)
        numbers = " or ".join(map(str, self._shapes))
        raise ValueError(
            f"the input of {type(self).__name__} must have {numbers} dimensions, "
            f"{' or '.join(self._shapes.values())}: got shape {tuple(input.shape)} on rank "
            f"{communicator.rank} of its group. SyncBatchNorm takes any number from 2."
        )


class NaiveSyncBatchNorm1d(_NaiveSyncBatchNorm):
    """Batch normalization of `(N, C)` or `(N, C, L)` over groups of ranks inside a machine.

    A `SyncBatchNorm` with the constructor of PySlowFast's layer. State dicts are those of
    nn.BatchNorm1d, which `revert_sync_batchnorm` makes of it. Communicates as `SyncBatchNorm` does,
    within the group; the first training step also finds the group, and is collective over all ranks
    of `process_group`.

    Parameters
    ----------
    num_sync_devices
        Ranks in a group: consecutive ones of the same machine, whose number of ranks it must
        divide. None, 0 or less: all ranks of the machine.
    global_sync
        Share statistics with all ranks of all machines; `num_sync_devices` is then not read.
    num_features
        Channels C of the input.
    process_group
        The ranks that are grouped: anything that `multibn.as_communicator` takes. None for the
        default process group where one is initialised when the layer is first used, else this
        process alone.
    **bn_args
        The other arguments of `SyncBatchNorm`: eps, momentum, affine, track_running_stats, device,
        dtype, bias, weighting, running_var. The statistics are those of the group's concatenated
        batch by default; `weighting="rank", running_var="biased"` gives the numbers of PySlowFast,
        TimeSformer and detectron2.

    Raises
    ------
    TypeError
        If `num_sync_devices` is neither an int nor None, or as `SyncBatchNorm` raises it.
    ValueError
        As `SyncBatchNorm`; in the first training step, if `num_sync_devices` does not divide the
        number of the machine's ranks. In each call, if the input has another number of dimensions;
        in training the other ranks of the group then raise RuntimeError.

    See Also
    --------
    multibn.Group : other groups, for `SyncBatchNorm(..., process_group=...)`.
    """

    converted_from = nn.BatchNorm1d
    _shapes = {2: "(N, C)", 3: "(N, C, L)"}


class NaiveSyncBatchNorm2d(_NaiveSyncBatchNorm):
    """Batch normalization of `(N, C, H, W)` over groups of ranks inside a machine.

    As `NaiveSyncBatchNorm1d`, in relation to nn.BatchNorm2d.
    """

    converted_from = nn.BatchNorm2d
    _shapes = {4: "(N, C, H, W)"}


class NaiveSyncBatchNorm3d(_NaiveSyncBatchNorm):
    """Batch normalization of `(N, C, T, H, W)` over groups of ranks inside a machine.

    As `NaiveSyncBatchNorm1d`, in relation to nn.BatchNorm3d.
    """

    converted_from = nn.BatchNorm3d
    _shapes = {5: "(N, C, T, H, W)"}


def _inside_machine(everyone: Communicator, num_sync_devices: int | None) -> Communicator:
    if num_sync_devices is not None and (
        not isinstance(num_sync_devices, int) or isinstance(num_sync_devices, bool)
    ):
        raise TypeError(
            "`num_sync_devices` must be an int, or None for all ranks of the machine: got "
            f"{num_sync_devices!r} of type {type(num_sync_devices).__qualname__}."
        )
    machine = Group(everyone, "machine")
    if num_sync_devices is None or num_sync_devices <= 0:
        return machine
    return Group(machine, num_sync_devices)
