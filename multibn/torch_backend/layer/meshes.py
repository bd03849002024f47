"""The ranks that share statistics along dimensions of a mesh."""

import warnings
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.base import Forwarding
from multibn.communicators.conversation import Conversation
from multibn.communicators.default import DefaultCommunicator


def sharing(communicator: Communicator, mesh: Any, dims: tuple[int, ...], /) -> Communicator:
    """The ranks that share along dimensions of a mesh, for a layer's conversation.

    A group that was named for the layer may have ranks outside of the mesh, which share, too.
    """
    if not isinstance(communicator, Conversation):  # evaluation without running statistics
        return along(mesh, dims)
    named: Any = communicator.wrapped
    return communicator.over(_named(named, mesh, dims))


@lru_cache(maxsize=256)
def along(mesh: Any, dims: tuple[int, ...]) -> Communicator:
    """The ranks along some dimensions of a mesh."""
    from multibn.communicators.transports.torch_distributed import restore

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
    members, world = _ranks(along(mesh, dims)), set(mesh.mesh.flatten().tolist())
    if isinstance(named, DefaultCommunicator):
        if dist.get_world_size() > len(world):
            warnings.warn(
                f"statistics are shared over ranks {sorted(members)}, by the placements of the "
                f"input on {mesh}, and with no rank outside of the mesh. To share them with ranks "
                "that hold further samples, pass a `process_group` with these; if there are none, "
                f"pass process_group={along(mesh, dims)!r}.",
                stacklevel=2,
            )
        return along(mesh, dims)
    if _ranks(named) & world != members:
        raise ValueError(
            f"`process_group` must have ranks {sorted(members)} of the mesh of the input, which "
            f"share by its placements, and no other ranks of {mesh}: got {named!r} on rank "
            f"{dist.get_rank()}. Pass None, and the placements alone decide."
        )
    return named


def _ranks(communicator: Communicator) -> set[int]:
    """The ranks of torch's default process group that a communicator has."""
    from multibn.communicators.transports.torch_distributed import TorchDistributed

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
