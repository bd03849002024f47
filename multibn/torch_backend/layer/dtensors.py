"""DTensors in, DTensors out: the placements of the input say which ranks share statistics.

This applies only if the layer's `process_group` is None; an explicit group takes precedence. On a
dimension of the mesh, `Shard(0)` and a spatial `Shard(d)`, d >= 2, divide the elements of each
channel, so the ranks along this dimension share. With `Replicate` they do not. No activation is
sent: a layer computes with local tensors, and its results get the placements of the input.
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
    """Call `function` with the local tensors and the communicator of the ranks that share.

    Collective. The output is a DTensor like the input.
    """
    mesh, shard_dims = _mesh_and_shard_dims(args.x)
    warning = ""
    if not isinstance(communicator, LayerCommunicator):  # evaluation without running statistics
        communicator, warning = _mesh_communicator(mesh, shard_dims)
    elif isinstance(communicator.communicator, DefaultCommunicator):
        along, warning = _mesh_communicator(mesh, shard_dims)
        communicator = communicator.for_group(along)
    y, batch = function(_localize(args, mesh, shard_dims), num_channels, communicator)
    # After the collective: where warnings are errors, one rank may raise here while others wait.
    _warn_once(warning)
    return _wrap_output(args.x, y), batch


def evaluate_local(
    function: Callable[..., Tensor], args: NormArgs, /, *statistics: Tensor | None
) -> Tensor:
    """Call `function` with the local tensors. The output is a DTensor like the input."""
    layout = _mesh_and_shard_dims(args.x)
    local = (_local_parameter(v, *layout) for v in statistics)
    return _wrap_output(args.x, function(_localize(args, *layout), *local))


def local_buffer(x: Any, /) -> Any:
    """Return the local tensor of a replicated running statistic or counter."""
    return _local_parameter(x, x.device_mesh, ()) if contains_dtensor([x]) else x


def _mesh_and_shard_dims(x: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the input's mesh, and the mesh dimensions on which it is sharded."""
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
    shard_dims = tuple(k for k, placement in enumerate(x.placements) if placement.is_shard())
    return x.device_mesh, shard_dims


def _localize(args: NormArgs, mesh: Any, shard_dims: tuple[int, ...]) -> NormArgs:
    """Return the arguments with this rank's local tensors, of the residual and parameters, too."""
    x, residual, placements = args.x, args.residual, args.x.placements
    if len(args.axis) < x.ndim - 1 or args.mask is not None:
        raise TypeError(
            "`mask`, `lengths` and num_splits are not supported for DTensor inputs: "
            f"got placements {placements}. Call to_local on the input, and pass a "
            "`process_group`."
        )
    if residual is not None:
        _check_placements("`residual`", residual, placements, mesh)
        residual = residual.to_local()
    weight, bias = (_local_parameter(p, mesh, shard_dims) for p in (args.weight, args.bias))
    return args._replace(x=x.to_local(), weight=weight, bias=bias, residual=residual)


def _local_parameter(p: Any, mesh: Any, shard_dims: tuple[int, ...]) -> Any:
    """Return the local tensor of a replicated parameter or buffer of shape `(C,)`.

    A plain parameter's gradient is local. A DTensor's is `Partial` where ranks hold different
    elements, as after DTensor's own operations.
    """
    if not contains_dtensor([p]):
        return p
    from torch.distributed.tensor import Partial, Replicate

    replicated = (Replicate(),) * mesh.ndim
    _check_placements("parameters and buffers that are DTensors", p, replicated, mesh)
    gradient = [Partial() if k in shard_dims else r for k, r in enumerate(replicated)]
    return p.to_local(grad_placements=gradient)


def _check_placements(what: str, v: Any, placements: tuple[Any, ...], mesh: Any) -> None:
    """Raise TypeError unless `v` is a DTensor with these placements on `mesh`, the input's."""
    found = getattr(v, "placements", "a plain tensor")
    if found != placements or v.device_mesh != mesh:
        where = f" on ranks {v.device_mesh.mesh.tolist()}" if contains_dtensor([v]) else ""
        raise TypeError(
            f"{what} must have placements {placements} on the mesh of the input, ranks "
            f"{mesh.mesh.tolist()}: got {found}{where}. Call distribute_tensor or redistribute."
        )


def _wrap_output(x: Any, y: Tensor) -> Tensor:
    """Wrap the local output `y` as a DTensor with the mesh, placements and shape of `x`."""
    options: Any = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    return type(x).from_local(y, x.device_mesh, x.placements, **options)


@lru_cache(maxsize=256)
def _mesh_communicator(mesh: Any, dims: tuple[int, ...]) -> tuple[Communicator, str]:
    """Return the communicator of the ranks along mesh dimensions `dims`, and a warning.

    The text is empty unless the job has ranks outside the mesh.
    """
    coordinate, num_ranks = mesh.get_coordinate(), dist.get_world_size()
    if coordinate is None:
        raise ValueError(
            f"the input's mesh must contain this rank, {dist.get_rank()}: got a mesh of ranks "
            f"{mesh.mesh.tolist()}. Call the layer on these ranks only."
        )
    here = [slice(None) if k in dims else n for k, n in enumerate(coordinate)]
    ranks = mesh.mesh[tuple(here)].flatten().tolist()
    found: Communicator
    if len(ranks) == 1:
        found, same = SingleProcess(), "multibn.SingleProcess()"
    elif len(dims) == 1:
        found, same = as_communicator(mesh.get_group(dims[0])), f"mesh.get_group({dims[0]})"
    else:
        same = f"torch.distributed.new_group({ranks}, use_local_synchronization=True)"
        found = as_communicator() if len(ranks) == num_ranks else restore(tuple(ranks))
    warning = (
        f"statistics are shared over ranks {sorted(ranks)}, by the placements of the input on "
        f"{mesh}, but not with ranks outside the mesh. If those hold further samples, pass a "
        "`process_group` that includes them; otherwise silence this with "
        f"process_group={same}, where `mesh` is the input's."
    )
    return found, warning if num_ranks > mesh.size() else ""


_warn_once = lru_cache(maxsize=256)(warn)
