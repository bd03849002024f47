"""Communicator over torch.distributed: gloo, nccl, or any other backend."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators import SingleProcess, as_communicator, is_outsiders_marker
from multibn.communicators._handle import Handle
from multibn.communicators._host import from_host, to_host


class TorchDistributed(Handle):
    """The processes of a torch ProcessGroup.

    Tensors are reduced on their own device where the group's backend can, and otherwise on one
    where it can; NumPy and CuPy arrays become tensors for the way.

    Parameters
    ----------
    group
        A ProcessGroup, a one-dimensional DeviceMesh, or None for the default process group.

    Raises
    ------
    ValueError
        If this process is not part of the group, or a DeviceMesh has several dimensions.
    TypeError
        If `group` is another object.
    """

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"a DeviceMesh must have one dimension: got {group.ndim}, {group}. "
                    "Pick one by name, mesh['dp'] for example."
                )
            group = group.get_group()
        if is_outsiders_marker(group):
            raise ValueError(
                f"this process, rank {dist.get_rank()} of the default group, is not part of the "
                "process group. Give each process the group it belongs to."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "a process group must be a torch ProcessGroup or DeviceMesh: "
                f"got {group!r} of type {type(group).__qualname__}."
            )
        self._group: dist.ProcessGroup | None = group
        # Global ranks in the order of the ranks here; None for the default group.
        self._ranks: tuple[int, ...] | None = None
        self._made_under = dist.group.WORLD
        if group is not None and group is not dist.group.WORLD:
            self._ranks = tuple(dist.get_process_group_ranks(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ProcessGroup."""
        if self._ranks is None:
            # The default group may have been made anew since the last use.
            if dist.group.WORLD is None:
                raise RuntimeError(
                    "no default process group is initialised. Call "
                    "torch.distributed.init_process_group() first, or pass None as communicator."
                )
            return dist.group.WORLD
        known = self.known_group
        if known is None:
            self._made_under, self._group = dist.group.WORLD, _find_group(self._ranks)
            return self._group
        return known

    @property
    def known_group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup if it can be told without communication, None for the default one."""
        # A new default process group voids those that were made under another.
        return self._group if self._made_under is dist.group.WORLD else None

    @property
    def rank(self) -> int:
        if self._ranks is None:
            return dist.get_rank()
        return self._ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def allreduce(self, x: Array, /) -> Array:
        if is_torch_array(x):
            return self._allreduce(x)
        if is_cupy_array(x):
            import cupy

            return cupy.from_dlpack(self._allreduce(torch.from_dlpack(x)))
        return from_host(self._allreduce(torch.tensor(to_host(x))).numpy(), x)

    def split(self, color: int, key: int = 0) -> "TorchDistributed":
        table = torch.zeros((self.size, 3), dtype=torch.int64)
        table[self.rank] = torch.tensor([color, key, dist.get_rank()])
        rows = sorted(self._allreduce(table).tolist(), key=lambda row: row[1])
        return _restore(tuple(rank for c, _, rank in rows if c == color))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._ranks is None:
            return as_communicator, ()
        if len(self._ranks) == 1:
            return SingleProcess, ()
        return _restore, (self._ranks,)

    def __repr__(self) -> str:
        ranks = "world" if self._ranks is None else list(self._ranks)
        return f"TorchDistributed(ranks={ranks})"

    def _allreduce(self, x: torch.Tensor) -> torch.Tensor:
        out = x.detach().to(self._transport_device(x.device), copy=True).contiguous()
        dist.all_reduce(out, group=self.group)
        return out.to(x.device)

    def _transport_device(self, device: torch.device) -> torch.device:
        # "cpu:gloo,cuda:nccl" for a group with a backend per device
        backends = dict(
            entry.split(":") for entry in dist.get_backend_config(self.group).split(",")
        )
        if device.type in backends:
            return device
        kind = next(iter(backends))
        return (
            torch.device("cuda", torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )


# Groups made here, by their sorted ranks (torch gives a group no other order), with the default
# group they were made under: a new one voids them.
_groups: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}


def _find_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of these global ranks. Collective over them when first called for them."""
    world = dist.group.WORLD
    if world is None or dist.get_rank() not in ranks or max(ranks) >= dist.get_world_size():
        where = (
            "no process group is initialised"
            if world is None
            else f"this is rank {dist.get_rank()} of {dist.get_world_size()}"
        )
        raise RuntimeError(
            f"the communicator was made for ranks {list(ranks)} of torch.distributed, and {where}. "
            "Give the layer another communicator, None for the default one."
        )
    key = tuple(sorted(ranks))
    made_under, group = _groups.get(key, (None, None))
    if group is None or made_under is not world:
        group = dist.new_group(list(key), use_local_synchronization=True)
        _groups[key] = world, group
    return group


def _restore(ranks: tuple[int, ...]) -> TorchDistributed:
    restored = TorchDistributed()
    restored._ranks = ranks
    return restored
