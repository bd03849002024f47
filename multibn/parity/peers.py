"""The originals, for comparison with multibn: the same interface around other layers.

The oracle expects of them the same as of multibn, but for the running variance, which each original
has in its own convention.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from multibn.communicators import Communicator
from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.surfaces import ChainerSurface, Surface, TorchSurface


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings of ChainerMN's link: the report shows the errors as numbers."""
    with warnings.catch_warnings():
        # The link asks for its device number, which Chainer 7 deprecates.
        warnings.filterwarnings("ignore", "Link._device_id", DeprecationWarning)
        # Square roots of negative variances, means of empty batches.
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


class ChainerMNSurface(ChainerSurface):
    """chainermn.links.MultiNodeBatchNormalization."""

    def __init__(self, case: Case, communicator: Any) -> None:
        import chainermn

        with warnings.catch_warnings():
            # ChainerMN warns that its own link is experimental.
            warnings.filterwarnings("ignore", category=FutureWarning)
            link = chainermn.links.MultiNodeBatchNormalization(
                CHANNELS,
                communicator.inner.comm,  # ChainerMN's own, inside the CountingCommunicator
                1 - MOMENTUM,
                EPS,
                case.parameters().weight.dtype,
            )
        super().__init__(case, link)

    train = _quiet()(ChainerSurface.train)
    evaluate = _quiet()(ChainerSurface.evaluate)


def torch_batch_norm(case: Case, communicator: Communicator) -> Surface:
    """torch.nn.BatchNorm1d, 2d or 3d of the whole batch, in one process."""
    from torch import nn

    cls = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(case.spatial)]
    return TorchSurface(case, cls(CHANNELS, EPS, None if case.cumulative else MOMENTUM))


def torch_sync_batch_norm(case: Case, communicator: Communicator) -> Surface:
    """torch.nn.SyncBatchNorm, which takes CUDA tensors only, over the default process group."""
    import torch

    device = f"cuda:{communicator.rank % torch.cuda.device_count()}"
    layer = torch.nn.SyncBatchNorm(CHANNELS, EPS, None if case.cumulative else MOMENTUM)
    return TorchSurface(case, layer, device=device)


class Peer(NamedTuple):
    """An original, with its communicator and its needs, see `command.NEEDS`."""

    make: Callable[[Case, Any], Surface]
    communicator: str
    needs: list[str]
    running_var: str  # its convention, whatever the case says


PEERS = {
    "ChainerMN's link": Peer(ChainerMNSurface, "chainermn naive", ["chainer"], "unbiased_local"),
    "nn.BatchNorm": Peer(torch_batch_norm, "single process", ["torch"], "unbiased_global"),
    "nn.SyncBatchNorm": Peer(torch_sync_batch_norm, "gloo", ["torch", "GPU"], "unbiased_global"),
}
