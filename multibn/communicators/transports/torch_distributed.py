"""Communicator over torch.distributed: gloo, nccl, or any other backend."""

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators.channel import (
    Begin,
    Channel,
    ChannelCommunicator,
    HostArray,
    Transport,
)
from multibn.communicators.communicator import Outside, SingleProcess, gather, is_outsiders_marker
from multibn.communicators.diagnostics import warn_if_launched
from multibn.communicators.exit import is_fork, rest_at_exit
from multibn.communicators.polling import Poll, chain, until_all_come
from multibn.communicators.resolve import as_communicator
from multibn.communicators.transports.gloo import BLOCK, PrivateGloo, in_group, sum_any
from multibn.communicators.transports.shared_memory import ROOM, SharedMemory, share
from multibn.communicators.transports.store import StoreStatusBoard, part_of_store


class TorchDistributed(ChannelCommunicator):
    """The processes of a torch ProcessGroup.

    Arrays on a GPU are summed there by a backend for GPUs, NCCL for example; over gloo they go
    through host memory. Arrays in host memory travel in memory that the ranks share if all are on
    one machine, and otherwise in a gloo group of multibn's own, so that no message of the program
    can be taken for one of multibn's; in the group itself only where that has a backend for GPUs
    alone. Sums on a GPU have the deadline of the backend's watchdog, the group's own, and no other.
    The group stays the program's: `destroy_process_group(group)` lets go of multibn's, too.

    Parameters
    ----------
    group
        A ProcessGroup, a one-dimensional DeviceMesh, or None for the default process group.

    Raises
    ------
    ValueError
        If this process is not part of the group.
    RuntimeError
        If a DeviceMesh has several dimensions: pick one by name, `mesh["dp"]` for example.
    TypeError
        If `group` is another object.

    Examples
    --------
    On each of two ranks, after `init_process_group`:

    >>> import numpy as np
    >>> from multibn.communicators.transports.torch_distributed import TorchDistributed
    >>> communicator = TorchDistributed()
    >>> communicator.size
    2
    >>> communicator.allreduce(np.asarray([1.0, 10.0]))
    array([ 2., 20.])
    """

    ends_with_torchs = True

    def __init__(self, group: Any = None) -> None:
        if is_outsiders_marker(group):
            Outside(group).rank  # noqa: B018 - raises
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "a process group must be a torch ProcessGroup or DeviceMesh: "
                f"got {group!r} of type {type(group).__qualname__}."
            )
        self._group = _reference(group)
        # Global ranks in the order of the group's ranks; None for the default group.
        self._ranks: tuple[int, ...] | None = None
        self._known_under = _reference(None if group is None else dist.group.WORLD)
        if group is not None and group is not dist.group.WORLD:
            self._ranks = tuple(dist.get_process_group_ranks(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ProcessGroup."""
        if self._ranks is None:
            # init_process_group may have run again since the last use.
            return dist.group.WORLD or dist.distributed_c10d._get_default_group()
        known = self.known_group
        if known is None:
            if dist.group.WORLD is not None and self._known_under() is dist.group.WORLD:
                raise RuntimeError(
                    f"the process group of ranks {list(self._ranks)} was destroyed. Give the layer "
                    "another one."
                )
            known = _world().find_group(self._ranks)
            self._known_under, self._group = _reference(dist.group.WORLD), _reference(known)
        return known

    @property
    def known_group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup where this process knows one already, without communication."""
        if self._ranks is None:
            return dist.group.WORLD
        # Groups end with the default process group under which they were made.
        return self._group() if self._known_under() is dist.group.WORLD else None

    @property
    def native(self) -> Any:
        """The ProcessGroup; the handle after the group was destroyed."""
        return self.known_group or self

    @property
    def rank(self) -> int:
        if self._ranks is None:
            return dist.get_rank()
        return self._ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def channel(self) -> Channel:
        return _world().channel_of(self.group)

    def takes(self, x: Array, /) -> bool:
        kind = "cuda" if is_cupy_array(x) else x.device.type if is_torch_array(x) else "cpu"
        # gloo, too, copies CUDA tensors to host memory, but would wait without a deadline.
        return kind != "cpu" and _backends(self.group).get(kind, "gloo") != "gloo"

    def allreduce_on_device(self, x: Array, /) -> Array:
        if is_cupy_array(x):
            import cupy

            return cupy.from_dlpack(self.allreduce_on_device(torch.from_dlpack(x)))
        return self.allreduce_in_place(x.detach().clone(memory_format=torch.contiguous_format))

    def allreduce_in_place(self, x: Array, /) -> Array:
        # As dist.all_reduce, which asks six functions about the group and the tensor.
        work = self.group.allreduce([x], _SUM)
        if work is not None:  # of a backend that does not wait by itself
            work.wait()
        return x

    def split(self, color: int, key: int = 0) -> "TorchDistributed":
        rows = gather((int(key), int(color), dist.get_rank()), self)
        rows.sort(key=lambda row: int(row[0]))
        colors = sorted({c for _, c, _ in rows})
        members = {c: tuple(r for _, d, r in rows if d == c) for c in colors}
        if self._ranks is None:
            _world().make_groups(members.values())
        return restore(members[color])

    def __reduce__(self) -> tuple[Any, ...]:
        # A group of all ranks would be made again only where all are in equally many groups.
        if self._ranks is None or (
            dist.is_initialized() and self._ranks == tuple(range(dist.get_world_size()))
        ):
            return as_communicator, ()
        if len(self._ranks) == 1:
            return SingleProcess, ()
        return restore, (self._ranks,)

    def __repr__(self) -> str:
        ranks = "world" if self._ranks is None else list(self._ranks)
        return f"TorchDistributed(ranks={ranks})"


def _reference(group: dist.ProcessGroup | None) -> Callable[[], dist.ProcessGroup | None]:
    """A reference with which a destroyed group, its threads and its connections can end."""
    return (lambda: None) if group is None else weakref.ref(group)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each kind of device: "cpu:gloo,cuda:nccl" is such a group's description."""
    entries = dist.get_backend_config(group).split(",")
    return dict(entry.split(":") for entry in entries)


class _Transport(Transport):
    """The ways of one group: shared memory, a gloo group of multibn's own, or the group itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if dist.get_world_size() == 1:
            fix = "pass init_process_group() the launcher's world_size and rank"
            warn_if_launched("torch.distributed has 1 process", fix)
        self._group = _reference(group)
        self._backends = _backends(group)
        self._name = group.group_name
        self.board: StoreStatusBoard | None = None
        self._machine: SharedMemory | None = None
        self._side: PrivateGloo | None = None

    def open(self) -> Iterator[Poll | None]:
        store = part_of_store(dist.distributed_c10d._get_default_store(), self._name, self.size)
        self.board = StoreStatusBoard(store, self.rank)
        yield until_all_come(store, self.size)
        self.carrier, room = "nccl", BLOCK
        # A network that works for NCCL need not work for gloo.
        if "cpu" in self._backends and dist.is_gloo_available():
            self._side = PrivateGloo(dist.PrefixStore("side", store), self.rank, self.size)
            machine = dist.PrefixStore("machine", store)
            self._machine = yield from share(machine, self.rank, self.size)
            if self._machine is None:
                self.carrier = "gloo"
                yield from self._side.connect()
            else:
                self.carrier, room = "shared memory", ROOM
        self.block = np.zeros(room)

    def prepare_block(self, n: int) -> Begin:
        # In shared memory, ranks may come with unlike lengths.
        return self.prepare(self.block if self._machine is None else self.block[:n])

    def prepare(self, a: HostArray) -> Begin:
        begin = None if self._machine is None else self._machine.prepare(a)
        return begin or (lambda: chain(self._sum_by_engine(a)))

    def _sum_by_engine(self, a: HostArray) -> Iterator[Poll]:
        if self._side is None:
            yield from sum_any(a, in_group(self._group, self._device()))
            return
        yield from self._side.connect()
        yield from sum_any(a, self._side.start)

    def _device(self) -> torch.device:
        """Where the group can sum; a `LayerPhase` makes the activation's GPU the current one."""
        kind = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        if kind == "cuda":
            bound: Any = getattr(self._group(), "bound_device_id", None)
            return bound or torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)

    def close(self, *, failed: bool, at_exit: bool = False) -> None:
        # Torch prints a trace where the process that keeps the store has ended.
        if not (failed or at_exit) and dist.is_initialized() and self.board is not None:
            self.board.clear(self.size)
        if self._side is not None:
            self._side.close(failed=failed)
        if self._machine is not None:
            self._machine.close(failed=failed)
            self._machine = None

    def end_process(self, *, failed: bool) -> None:
        # Torchrun ends the other ranks when it sees that this process has failed.
        # A process that ends with gloo's threads running is aborted now and then (3 of 24 in a
        # trial).
        global _latest_world
        _latest_world = None
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


class _World:
    """The facts under one default process group; with another, all are found out anew."""

    def __init__(self) -> None:
        self.default_group = _reference(dist.group.WORLD)
        rest_at_exit()
        self.channels: MutableMapping[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
        # Groups made here, by their sorted ranks: torch gives a group no other order.
        self.groups: MutableMapping[tuple[int, ...], dist.ProcessGroup] = (
            weakref.WeakValueDictionary()
        )
        # Those among them that all ranks of the default group have made together.
        self.split: set[tuple[int, ...]] = set()

    def channel_of(self, group: dist.ProcessGroup) -> Channel:
        """The channel of all handles of one process group."""
        channel = self.channels.get(group)
        if channel is None:
            channel = self.channels[group] = Channel(_Transport(group))
            # torch tells nobody that a group was destroyed, but drops it.
            weakref.finalize(group, channel.close).atexit = False
            if is_fork(dist.group.WORLD):
                channel.abandon_after_fork()
        return channel

    def find_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these global ranks. Collective over them when first called for them."""
        where, size = "no process group is initialised", 0
        if self.default_group() is not None:
            size = dist.get_world_size()
            where = f"this is rank {dist.get_rank()} of {size}"
        if max(ranks) >= size or dist.get_rank() not in ranks:
            raise RuntimeError(
                f"the communicator was made for ranks {list(ranks)} of torch.distributed, and "
                f"{where}. Give the layer another communicator, None for the default one."
            )
        key = tuple(sorted(ranks))
        if key not in self.groups:
            # torch numbers such groups by how many groups a rank is in: equal numbers are needed.
            self.groups[key] = dist.new_group(list(key), use_local_synchronization=True)
        return self.groups[key]

    def make_groups(self, members: Iterable[tuple[int, ...]]) -> None:
        """Make groups of global ranks. Collective over the default group."""
        for ranks in members:
            key = tuple(sorted(ranks))
            # Not `key in self.groups`: a rank inside the group may know the group from elsewhere.
            if key not in self.split:
                self.split.add(key)
                group = dist.new_group(list(key))
                if not is_outsiders_marker(group):
                    self.groups[key] = group


_SUM = dist.AllreduceOptions()
_SUM.asyncOp = False  # in the current stream
_latest_world: _World | None = None


def _world() -> _World:
    global _latest_world
    if _latest_world is None or _latest_world.default_group() is not dist.group.WORLD:
        _latest_world = _World()
    return _latest_world


def restore(ranks: tuple[int, ...]) -> TorchDistributed:
    """The processes with these ranks of the default group. Their first use is collective."""
    restored = TorchDistributed()
    restored._ranks = ranks
    return restored
