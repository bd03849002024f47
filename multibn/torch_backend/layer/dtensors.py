"""DTensors in, DTensors out: the placements of the input say which ranks share statistics.

They do so for a layer whose `process_group` is None; a group that was named decides by itself. On a
dimension of the mesh, `Shard(0)` and a spatial `Shard(d)`, d >= 2, divide the elements of each
channel, so that the ranks along this dimension share. `Replicate` divides nothing: these ranks do
not share. No activation moves: a layer computes with local tensors, and its results get the
placements of the input.
"""

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from multibn._warnings import warn
from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.communicators.resolve import DefaultCommunicator
from multibn.communicators.transports.torch_distributed import restore
from multibn.engine.plan import NormArgs
from multibn.engine.statistics import BatchStatistics


def contains_dtensor(tensors: Iterable[Any], /) -> bool:
    """Whether one of `tensors` is a DTensor."""
    # A program without DTensors need not import their module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in [type(t) for t in tensors]


def normalize_local(
    function: Callable[..., tuple[Tensor, BatchStatistics]],
    args: NormArgs,
    num_channels: int | None,
    communicator: Communicator,
) -> tuple[Tensor, BatchStatistics]:
    """Apply `function` to the local tensors and the ranks that share. Collective.

    The output is a DTensor like the input.
    """
    mesh, sharing = _layout(args.x)
    warning = ""
    if not isinstance(communicator, LayerCommunicator):  # evaluation without running statistics
        communicator, warning = _mesh_communicator(mesh, sharing)
    elif isinstance(communicator.communicator, DefaultCommunicator):
        along, warning = _mesh_communicator(mesh, sharing)
        communicator = communicator.for_group(along)
    y, batch = function(_localize(args, mesh, sharing), num_channels, communicator)
    if warning:  # after the message: on one rank, it may be an error
        _warn_once(warning)
    return _wrap_output(args.x, y), batch


def evaluate_local(
    function: Callable[..., Tensor], args: NormArgs, /, *statistics: Tensor | None
) -> Tensor:
    """Apply `function` to the local tensors. The output is like the input."""
    layout = _layout(args.x)
    local = (_parameter(v, *layout) for v in statistics)
    return _wrap_output(args.x, function(_localize(args, *layout), *local))


def buffer(x: Any, /) -> Any:
    """Return the local tensor of a replicated running statistic or counter."""
    return _parameter(x, x.device_mesh, ()) if contains_dtensor([x]) else x


def _layout(x: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh of an input, and those of its dimensions that divide the elements of a channel."""
    if not contains_dtensor([x]):
        raise TypeError(
            "the input must be a DTensor if the layer's parameters, its buffers or the residual "
            f"are DTensors: got a {type(x).__qualname__}. Call distribute_tensor on the input, or "
            "full_tensor on the others."
        )
    from torch.distributed.tensor import Replicate, Shard

    for k, placement in enumerate(x.placements):
        if not isinstance(placement, Shard | Replicate) or placement.is_shard(1):
            raise TypeError(
                "a DTensor input must be Replicate or Shard on a dimension other than the "
                f"channels: got {placement!r} on dimension {k} of {x.device_mesh}. "
                "Call redistribute first, or to_local, and pass the ranks that share these "
                "channels as `process_group`."
            )
    sharing = tuple(k for k, placement in enumerate(x.placements) if placement.is_shard())
    return x.device_mesh, sharing


def _localize(args: NormArgs, mesh: Any, sharing: tuple[int, ...]) -> NormArgs:
    """The local part of an input, and of what goes with it."""
    x, residual, placements = args.x, args.residual, args.x.placements
    if len(args.axis) < x.ndim - 1 or args.mask is not None:
        raise TypeError(
            "`mask`, `lengths` and num_splits are not supported for DTensor inputs: "
            f"got placements {placements}. Call to_local on the input, and pass a "
            "`process_group`."
        )
    if residual is not None:
        others = getattr(residual, "placements", None)
        if others != placements or residual.device_mesh != mesh:
            where = f" on ranks {residual.device_mesh.mesh.tolist()}" if others else ""
            raise TypeError(
                f"`residual` must have the placements and the mesh of the input, {placements} on "
                f"ranks {mesh.mesh.tolist()}: got {others or 'a plain tensor'}{where}. Call "
                "distribute_tensor or redistribute on it."
            )
        residual = residual.to_local()
    weight, bias = (_parameter(p, mesh, sharing) for p in (args.weight, args.bias))
    return args._replace(x=x.to_local(), weight=weight, bias=bias, residual=residual)


def _parameter(p: Any, mesh: Any, sharing: tuple[int, ...]) -> Any:
    """Return the local tensor of a replicated parameter or buffer of shape `(C,)`.

    A plain parameter's gradient is local. A DTensor's is `Partial` where ranks hold different
    elements, as after DTensor's own operations.
    """
    if not contains_dtensor([p]):
        return p
    from torch.distributed.tensor import Partial, Replicate

    replicated = [Replicate()] * p.device_mesh.ndim
    if p.device_mesh != mesh or list(p.placements) != replicated:
        raise TypeError(
            "parameters and buffers that are DTensors must be Replicate on the mesh of the input, "
            f"{mesh}: got {p.placements} on {p.device_mesh}. Call full_tensor on them, or give "
            "the layer a DTensor."
        )
    gradient = [Partial() if k in sharing else r for k, r in enumerate(replicated)]
    return p.to_local(grad_placements=gradient)


def _wrap_output(x: Any, y: Tensor) -> Tensor:
    """The output for `x`, whose local part is `y`."""
    options: Any = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return type(x).from_local(y, x.device_mesh, x.placements, **options)


@lru_cache(maxsize=256)
def _mesh_communicator(mesh: Any, dims: tuple[int, ...]) -> tuple[Communicator, str]:
    """The ranks along some dimensions of a mesh, and a warning if there are others."""
    coordinate, num_ranks = mesh.get_coordinate(), dist.get_world_size()
    if coordinate is None:
        raise ValueError(
            f"the input's mesh must contain this rank, {dist.get_rank()}: got a mesh of ranks "
            f"{mesh.mesh.tolist()}. Call the layer on these ranks only."
        )
    here = [slice(None) if k in dims else n for k, n in enumerate(coordinate)]
    ranks = mesh.mesh[tuple(here)].flatten().tolist()
    same = f"torch.distributed.new_group({ranks}, use_local_synchronization=True)"
    if len(ranks) == 1:
        found: Communicator = SingleProcess()
        same = "multibn.SingleProcess()"
    elif len(dims) == 1:
        found = as_communicator(mesh.get_group(dims[0]))
        same = f"mesh.get_group({dims[0]})"
    else:
        found = as_communicator() if len(ranks) == num_ranks else restore(tuple(ranks))
    warning = (
        f"statistics are shared over ranks {sorted(ranks)}, by the placements of the input on "
        f"{mesh}, but not with ranks outside the mesh. If those hold further samples, pass a "
        "`process_group` that includes them; otherwise silence this with "
        f"process_group={same}, where `mesh` is the input's."
    )
    return found, warning if num_ranks > mesh.size() else ""


@lru_cache(maxsize=256)
def _warn_once(warning: str) -> None:
    warn(warning)
