"""DTensors in, DTensors out: the placements of the input say which ranks share statistics.

On a dimension of the mesh, `Shard(0)` and a spatial `Shard(d)`, d >= 2, divide the elements of each
channel, so that the ranks along this dimension share. `Shard(1)` divides the channels, `Replicate`
divides nothing: these ranks do not share. No activation moves: a layer computes with local tensors,
and its results get the placements of the input.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.base import Forwarding
from multibn.communicators.conversation import Conversation
from multibn.communicators.default import DefaultCommunicator
from multibn.kernels import Running
from multibn.statistics import BatchStatistics
from multibn.step import Input


def among(tensors: Iterable[Any], /) -> bool:
    """Whether one of `tensors` is a DTensor."""
    # A program without DTensors need not import their module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for t in tensors:
            if type(t) is module.DTensor:
                return True
    return False


def forward_all(
    function: Callable[..., list[tuple[Tensor, BatchStatistics]]],
    inputs: Sequence[Input],
    num_channels: Sequence[int | None],
    communicator: Communicator,
) -> list[tuple[Tensor, BatchStatistics]]:
    """Apply `function` to the local tensors and the ranks that share. Collective.

    The outputs are DTensors like the inputs; the statistics are plain, and those of all channels.
    """
    layouts = [_Layout(i.x) for i in inputs]
    if len({(layout.mesh, layout.sharing) for layout in layouts}) > 1:
        raise ValueError(
            "inputs that share a message must be shared over the same dimensions of a mesh: got "
            f"placements {[layout.placements for layout in layouts]}. Call the layers one by one."
        )
    local = [layout.localize(i) for layout, i in zip(layouts, inputs, strict=True)]
    first = layouts[0]
    if first.mesh is not None:
        num_channels = [i.x.shape[1] for i in local]
        if isinstance(communicator, Conversation):
            named: Any = communicator.wrapped
            communicator = communicator.over(_sharing(named, first.mesh, first.sharing))
        else:  # evaluation without running statistics
            communicator = _along(first.mesh, first.sharing)
    results = function(local, num_channels, communicator)
    return [
        (layout.wrap(y), layout.gather(batch))
        for layout, (y, batch) in zip(layouts, results, strict=True)
    ]


def evaluate(function: Callable[..., Tensor], x: Tensor, /, *parameters: Tensor | None) -> Tensor:
    """Apply `function` to the local tensors. The output is like `x`."""
    layout = _Layout(x)
    return layout.wrap(function(layout.local(x), *map(layout.parameter, parameters)))


def local_running(running: Running, batch: BatchStatistics, /) -> tuple[Running, BatchStatistics]:
    """The local memory of running statistics, and of `batch` the channels that are there."""
    mean, var, *options, counter = running
    _check_placements("running_mean", mean)
    _check_placements("running_var", var)
    local = Running(
        mean.to_local(),
        var.to_local(),
        *options,
        counter.to_local() if among([counter]) else counter,
    )
    start, num = _part(mean, 0)
    return local, batch._replace(
        mean=batch.mean.narrow(0, start, num), var=batch.var.narrow(0, start, num)
    )


class _Layout:
    """How the elements of an input `(N, C, *spatial)` lie on a mesh; without one if it is plain.

    Attributes
    ----------
    sharing, dividing
        The dimensions of the mesh that divide the elements of each channel, and the channels.
    """

    def __init__(self, x: Any) -> None:
        self.mesh: Any = None
        self.placements: Any = None
        self.sharing: tuple[int, ...] = ()
        self.dividing: tuple[int, ...] = ()
        if not among([x]):
            return
        _check_placements("the input", x)
        self.mesh, self.placements = x.device_mesh, x.placements
        self.shape, self.stride = x.shape, x.stride()
        dims = [getattr(placement, "dim", None) for placement in x.placements]
        self.sharing = tuple(k for k, dim in enumerate(dims) if dim not in (None, 1))
        self.dividing = tuple(k for k, dim in enumerate(dims) if dim == 1)
        if self.dividing:
            self.start, self.num = _part(x, 1)
            num_parts = [self.mesh.size(k) for k in self.dividing]
            if 0 in _chunks(self.shape[1], num_parts):
                raise ValueError(
                    f"each rank must have channels of the input: got {self.shape[1]} channels "
                    f"divided over {num_parts} ranks, by placements {self.placements}."
                )

    def localize(self, i: Input) -> Input:
        """The local part of an input, and of what goes with it."""
        if i.axis and among(i[:3]):
            raise TypeError(
                "a layer that normalizes parts of a batch apart cannot take a DTensor: got "
                f"placements {self.placements}. Call to_local on the input."
            )
        residual = i.residual
        if residual is not None and getattr(residual, "placements", None) != self.placements:
            raise TypeError(
                f"`residual` must have the placements of the input, {self.placements}: got "
                f"{getattr(residual, 'placements', 'a plain tensor')}."
            )
        return i._replace(
            x=self.local(i.x),
            weight=self.parameter(i.weight),
            bias=self.parameter(i.bias),
            residual=None if residual is None else self.local(residual),
            running=None,  # the caller moves them, by the statistics of all channels
        )

    def local(self, x: Any) -> Tensor:
        """This rank's part of an activation."""
        local: Tensor = x if self.mesh is None else x.to_local()
        return local

    def parameter(self, p: Any) -> Tensor | None:
        """This rank's channels of a parameter or buffer of shape (C,).

        A plain parameter's gradient is local. A DTensor's is `Partial` where ranks hold different
        elements, as after DTensor's own operations.
        """
        if not among([p]):
            return p.narrow(0, self.start, self.num) if self.dividing and p is not None else p
        from torch.distributed.tensor import Partial, Replicate, Shard

        if self.mesh not in (None, p.device_mesh):
            raise TypeError(
                "parameters and buffers that are DTensors must be on the mesh of the input, "
                f"{self.mesh}: got {p.device_mesh}."
            )
        placements: list[Any] = [Replicate()] * p.device_mesh.ndim
        for k in self.dividing:
            placements[k] = Shard(0)
        if p.placements != tuple(placements):
            p = p.redistribute(placements=placements)
        # Ranks with plain inputs have batches of their own.
        for k in self.sharing if self.mesh is not None else range(len(placements)):
            placements[k] = Partial()
        local: Tensor = p.to_local(grad_placements=placements)
        return local

    def wrap(self, y: Tensor) -> Tensor:
        """The output whose local part is `y`."""
        if self.mesh is None:
            return y
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            y, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def gather(self, batch: BatchStatistics) -> BatchStatistics:
        """The statistics of all channels. One allreduce of 2C numbers if these are divided."""
        if not self.dividing:
            return batch
        rows = batch.mean.new_zeros((2, self.shape[1]))
        rows[:, self.start : self.start + self.num] = torch.stack((batch.mean, batch.var))
        mean, var = _along(self.mesh, self.dividing).allreduce(rows)
        return batch._replace(mean=mean, var=var)


def _check_placements(name: str, x: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for k, placement in enumerate(x.placements):
        if not isinstance(placement, Shard | Replicate):
            raise TypeError(
                f"the placements of {name}, a DTensor, must be Shard or Replicate: got "
                f"{placement!r} on dimension {k} of {x.device_mesh}. Call redistribute first."
            )


def _part(x: Any, axis: int) -> tuple[int, int]:
    """Where this rank's part of an axis begins, and its length."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return start[axis], shape[axis]


def _chunks(size: int, num_parts: Sequence[int]) -> list[int]:
    """The lengths after torch.chunk into so many parts, one division after the other."""
    sizes = [size]
    for num in num_parts:
        steps = [-(-n // num) for n in sizes]
        sizes = [
            max(min(step, n - k * step), 0)
            for n, step in zip(sizes, steps, strict=True)
            for k in range(num)
        ]
    return sizes


@lru_cache(maxsize=256)
def _sharing(named: Communicator, mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks that share over dimensions of a mesh, if a layer's ranks are `named`.

    `named` may have ranks outside of the mesh, which then share, too.
    """
    along = _along(mesh, dims)
    members, world = _ranks(along), set(mesh.mesh.flatten().tolist())
    if isinstance(named, DefaultCommunicator):
        if dist.get_world_size() > len(world):
            warnings.warn(
                f"statistics are shared over ranks {sorted(members)}, by the placements of the "
                f"input on {mesh}, and with no rank outside of the mesh. To share them with ranks "
                "that hold further samples, pass a `process_group` with these; if there are none, "
                f"pass process_group={along!r}.",
                stacklevel=2,
            )
        return along
    if _ranks(named) & world != members:
        raise ValueError(
            f"`process_group` must have ranks {sorted(members)} of the mesh of the input, which "
            f"share by its placements, and no other ranks of {mesh}: got {named!r} on rank "
            f"{dist.get_rank()}. Pass None, and the placements alone decide."
        )
    return named


def _ranks(communicator: Communicator) -> set[int]:
    """The ranks of torch's default process group that a communicator has."""
    from multibn.communicators.torch_distributed import TorchDistributed

    if isinstance(communicator, Forwarding):
        communicator = communicator.resolve()
    if isinstance(communicator, TorchDistributed):
        return set(dist.get_process_group_ranks(communicator.group))
    if isinstance(communicator, SingleProcess):
        return {dist.get_rank()}
    raise TypeError(
        "`process_group` must be None or processes of torch.distributed, for a DTensor as input: "
        f"got {communicator!r}."
    )


@lru_cache(maxsize=256)
def _along(mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks along some dimensions of a mesh."""
    from multibn.communicators.torch_distributed import restore

    if not dims:
        return SingleProcess()
    if len(dims) == 1:
        return as_communicator(mesh.get_group(dims[0]))
    here = [slice(None) if k in dims else n for k, n in enumerate(mesh.get_coordinate())]
    ranks = mesh.mesh[tuple(here)].flatten().tolist()
    return as_communicator() if len(ranks) == dist.get_world_size() else restore(tuple(ranks))
