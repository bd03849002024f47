"""The originals, which multibn is compared with: same interface, other layers.

Their running variance is compared with the oracle's in the convention that they have, `running_var`
of the case being multibn's; all else is expected of them as of multibn.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from multibn.communicators import Communicator
from multibn.parity.cases import CHANNELS, EPS, MOMENTUM, Case, NDArrayAny
from multibn.parity.surfaces import ChainerSurface, Step, Surface, TorchSurface


class ChainerMNSurface(ChainerSurface):
    """chainermn.links.MultiNodeBatchNormalization."""

    def __init__(self, case: Case, communicator: Any) -> None:
        import chainermn

        with warnings.catch_warnings():
            # ChainerMN calls its own link experimental.
            warnings.filterwarnings("ignore", category=FutureWarning)
            link = chainermn.links.MultiNodeBatchNormalization(
                CHANNELS,
                communicator.inner.comm,  # ChainerMN's own, inside the one that counts
                1 - MOMENTUM,
                EPS,
                case.parameters().weight.dtype,
            )
        super().__init__(case, link)

    def train(self, x: NDArrayAny, dy: NDArrayAny) -> Step:
        with _quiet():
            return super().train(x, dy)

    def evaluate(self, x: NDArrayAny) -> NDArrayAny:
        with _quiet():
            return super().evaluate(x)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of ChainerMN's link: they are what the report shows, as numbers."""
    with warnings.catch_warnings():
        # It asks for its device number, which Chainer 7 deprecates.
        warnings.filterwarnings("ignore", "Link._device_id", DeprecationWarning)
        # Square roots of negative variances, means of empty batches.
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


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
    """An original: how to make it, over which communicator, what it needs, and what it keeps."""

    make: Callable[[Case, Any], Surface]
    communicator: str
    needs: list[str]
    running_var: str  # whatever the case says


PEERS = {
    "ChainerMN's link": Peer(ChainerMNSurface, "chainermn naive", ["chainer"], "unbiased_local"),
    "nn.BatchNorm": Peer(torch_batch_norm, "single process", ["torch"], "unbiased_global"),
    "nn.SyncBatchNorm": Peer(torch_sync_batch_norm, "gloo", ["torch", "GPU"], "unbiased_global"),
}
