"""DTensors in, DTensors out: the placements of the input say which ranks share statistics.

On a dimension of the mesh, `Shard(0)` and a spatial `Shard(d)`, d >= 2, divide the elements of each
channel, so that the ranks along this dimension share. `Shard(1)` divides the channels, `Replicate`
divides nothing: these ranks do not share. No activation moves: a layer computes with local tensors,
and its results get the placements of the input.
"""

import math
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
from multibn.communicators.lookup import DefaultCommunicator
from multibn.communicators.transports.torch_distributed import TorchDistributed, restore
from multibn.engine import recompute, step
from multibn.engine.population import Pool
from multibn.engine.statistics import BatchStatistics
from multibn.engine.step import Input
from multibn.kernels import Running


def among(tensors: Iterable[Any], /) -> bool:
    """Whether one of `tensors` is a DTensor."""
    # A program without DTensors need not import their module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in [type(t) for t in tensors]


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
        communicator = _sharing(communicator, first.mesh, first.sharing)
    results = []
    parts = function(local, num_channels, communicator)
    for i, layout, (y, batch) in zip(inputs, layouts, parts, strict=True):
        batch = layout.gather(batch)
        if i.running is not None and not recompute.in_recomputing():
            move(i.running, batch, i.x.numel() // i.x.shape[1])
        results.append((layout.wrap(y), batch))
    return results


def uncompiled(forward: Callable[..., Any], /) -> Callable[..., Any]:
    """Where torch.compile traces: without it, as no operator takes DTensors and plain tensors."""
    torch._dynamo.graph_break(
        msg="a layer does not compile its forward pass with a DTensor, and runs it as it is. "
        "Call torch.compile without fullgraph=True."
    )
    return torch.compiler.disable(forward)


def evaluate(function: Callable[..., Tensor], x: Tensor, /, *parameters: Tensor | None) -> Tensor:
    """Apply `function` to the local tensors. The output is like `x`."""
    layout = _Layout(x)
    return layout.wrap(function(_local(x), *map(layout.parameter, parameters)))


def move(running: Running | Pool, batch: BatchStatistics, local_count: float | Tensor) -> None:
    """Move running statistics in place, which may be DTensors, or add the batch to a pool."""
    if isinstance(running, Running) and among([running.mean]):
        _check_placements("running_mean", running.mean)
        _check_placements("running_var", running.var)
        part = _part(running.mean, 0)
        batch = batch._replace(mean=batch.mean.narrow(0, *part), var=batch.var.narrow(0, *part))
        running = Running(*map(_local, running))
    step.move(running, batch, local_count)


class _Layout:
    """How the elements of an input `(N, C, *spatial)` lie on a mesh; without one if it is plain.

    Attributes
    ----------
    sharing, dividing
        The dimensions of the mesh that divide the elements of each channel, and the channels.
    part
        If these are divided, where this rank's channels begin, and their number.
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
            self.part = _part(x, 1)
            num_parts = [self.mesh.size(k) for k in self.dividing]
            chunks = [torch.empty(x.shape[1], device="meta")]
            for num in num_parts:  # as DTensor divides; an empty chunk is left out
                chunks = [part for chunk in chunks for part in chunk.chunk(num)]
            if len(chunks) < math.prod(num_parts):
                raise ValueError(
                    f"each rank must have channels of the input: got {x.shape[1]} channels "
                    f"divided over {num_parts} ranks, by placements {self.placements}."
                )

    def localize(self, i: Input) -> Input:
        """The local part of an input, and of what goes with it."""
        if len(i.axis) < i.x.ndim - 1 and among(i[:3]):
            raise TypeError(
                "a layer that normalizes parts of a batch apart cannot take a DTensor: got "
                f"placements {self.placements}. Call to_local on the input."
            )
        if i.mask is not None:
            raise TypeError(
                f"`mask` and `lengths` do not go with a DTensor: got placements {self.placements}. "
                "Call to_local on the input, and pass a `process_group`."
            )
        placements = getattr(i.residual, "placements", None)
        if i.residual is not None and placements != self.placements:
            raise TypeError(
                f"`residual` must have the placements of the input, {self.placements}: got "
                f"{placements or 'a plain tensor'}."
            )
        x, weight, bias = _local(i.x), self.parameter(i.weight), self.parameter(i.bias)
        # `forward_all` moves `running`, by the statistics of all channels.
        return i._replace(x=x, weight=weight, bias=bias, residual=_local(i.residual), running=None)

    def parameter(self, p: Any) -> Any:
        """This rank's channels of a parameter or buffer of shape (C,).

        A plain parameter's gradient is local. A DTensor's is `Partial` where ranks hold different
        elements, as after DTensor's own operations.
        """
        if not among([p]):
            return p.narrow(0, *self.part) if self.dividing and p is not None else p
        from torch.distributed.tensor import Partial, Replicate, Shard

        if self.mesh not in (None, p.device_mesh):
            raise TypeError(
                "parameters and buffers that are DTensors must be on the mesh of the input, "
                f"{self.mesh}: got {p.device_mesh}."
            )
        dims = range(p.device_mesh.ndim)
        placements: list[Any] = [Shard(0) if k in self.dividing else Replicate() for k in dims]
        if p.placements != tuple(placements):
            p = p.redistribute(placements=placements)
        # Ranks with plain inputs have batches of their own.
        for k in dims if self.mesh is None else self.sharing:
            placements[k] = Partial()
        return p.to_local(grad_placements=placements)

    def wrap(self, y: Tensor) -> Tensor:
        """The output whose local part is `y`."""
        if self.mesh is None:
            return y
        from torch.distributed.tensor import DTensor

        options: Any = {"run_check": False, "shape": self.shape, "stride": self.stride}
        return DTensor.from_local(y, self.mesh, self.placements, **options)

    def gather(self, batch: BatchStatistics) -> BatchStatistics:
        """The statistics of all channels. One allreduce of 2C numbers if these are divided."""
        if not self.dividing:
            return batch
        rows = batch.mean.new_zeros((2, self.shape[1]))
        rows.narrow(1, *self.part).copy_(torch.stack((batch.mean, batch.var)))
        mean, var = _along(self.mesh, self.dividing).allreduce(rows)
        return batch._replace(mean=mean, var=var)


def _local(x: Any) -> Any:
    """This rank's part of a tensor."""
    return x.to_local() if among([x]) else x


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


def _sharing(communicator: Communicator, mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks that share along dimensions of a mesh, for a layer's conversation.

    A group that was named for the layer may have ranks outside of the mesh, which share, too.
    """
    if not isinstance(communicator, Conversation):  # evaluation without running statistics
        return _along(mesh, dims)
    named: Any = communicator.wrapped
    return communicator.over(_named(named, mesh, dims))


@lru_cache(maxsize=256)
def _along(mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks along some dimensions of a mesh."""
    if not dims:
        return SingleProcess()
    if len(dims) == 1:
        return as_communicator(mesh.get_group(dims[0]))
    here = [slice(None) if k in dims else n for k, n in enumerate(mesh.get_coordinate())]
    ranks = mesh.mesh[tuple(here)].flatten().tolist()
    return as_communicator() if len(ranks) == dist.get_world_size() else restore(tuple(ranks))


@lru_cache(maxsize=256)
def _named(named: Communicator, mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks that share, if a layer's ranks are `named`."""
    members, world = _ranks(_along(mesh, dims)), set(mesh.mesh.flatten().tolist())
    if isinstance(named, DefaultCommunicator):
        if dist.get_world_size() > len(world):
            warnings.warn(
                f"statistics are shared over ranks {sorted(members)}, by the placements of the "
                f"input on {mesh}, and with no rank outside of the mesh. To share them with ranks "
                "that hold further samples, pass a `process_group` with these; if there are none, "
                f"pass process_group={_along(mesh, dims)!r}.",
                stacklevel=2,
            )
        return _along(mesh, dims)
    if _ranks(named) & world != members:
        raise ValueError(
            f"`process_group` must have ranks {sorted(members)} of the mesh of the input, which "
            f"share by its placements, and no other ranks of {mesh}: got {named!r} on rank "
            f"{dist.get_rank()}. Pass None, and the placements alone decide."
        )
    return named


def _ranks(communicator: Communicator) -> set[int]:
    """The ranks of torch's default process group that a communicator has."""
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
