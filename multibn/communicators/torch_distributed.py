"""Communicator over torch.distributed: gloo, nccl, or any other backend."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators._lines import HostArray, Line, LineCommunicator, Lines, Transport
from multibn.communicators._store import StoreBoard
from multibn.communicators._watch import Done, check_timeout
from multibn.communicators.base import SingleProcess
from multibn.communicators.default import default_communicator, is_outsiders_marker


class TorchDistributed(LineCommunicator):
    """The processes of a torch ProcessGroup.

    Arrays on a GPU are summed there by a backend for GPUs, NCCL for example; over gloo they go
    through host memory. Arrays in host memory travel over gloo in groups of multibn's own, so that
    no message of the program can be taken for one of multibn's, and over another backend in the
    group itself.

    Parameters
    ----------
    group
        A ProcessGroup, a one-dimensional DeviceMesh, or None for the default process group.
    timeout
        Seconds that a collective of arrays in host memory may take; default: MULTIBN_TIMEOUT, or
        300. For arrays on a GPU, the backend's watchdog counts, with the group's timeout.

    Raises
    ------
    ValueError
        If this process is not part of the group, a DeviceMesh has several dimensions, or `timeout`
        is not positive.
    TypeError
        If `group` is another object.
    """

    def __init__(self, group: Any = None, *, timeout: float | None = None) -> None:
        self.timeout = check_timeout(timeout)
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
        # Global ranks in the order of the group's ranks; None for the default group.
        self._ranks: tuple[int, ...] | None = None
        self._known_under = None if group is None else dist.group.WORLD
        if group is not None and group is not dist.group.WORLD:
            self._ranks = tuple(dist.get_process_group_ranks(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ProcessGroup."""
        if self._ranks is None:
            # init_process_group may have run again since the last use.
            if dist.group.WORLD is None:
                raise RuntimeError(
                    "no default process group is initialised. Call "
                    "torch.distributed.init_process_group() first, or pass None as communicator."
                )
            return dist.group.WORLD
        known = self.known_group
        if known is None:
            self._known_under, self._group = dist.group.WORLD, _world().find_group(self._ranks)
            return self._group
        return known

    @property
    def known_group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup where this process knows one already, without communication."""
        # Groups end with the default process group under which they were made.
        return self._group if self._known_under is dist.group.WORLD else None

    @property
    def rank(self) -> int:
        if self._ranks is None:
            return dist.get_rank()
        return self._ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def default_group(self) -> object:
        return dist.group.WORLD

    @property
    def lines(self) -> Lines:
        return _world().lines_of(self.group)

    def takes(self, x: Array, /) -> bool:
        kind = "cuda" if is_cupy_array(x) else x.device.type if is_torch_array(x) else "cpu"
        # gloo, too, copies CUDA tensors to host memory, but would wait without a deadline.
        return kind != "cpu" and _backends(self.group).get(kind, "gloo") != "gloo"

    def allreduce_on_device(self, x: Array, /) -> Array:
        if is_cupy_array(x):
            import cupy

            return cupy.from_dlpack(self.allreduce_on_device(torch.from_dlpack(x)))
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def split(self, color: int, key: int = 0) -> "TorchDistributed":
        table = torch.zeros((self.size, 3), dtype=torch.int64)
        table[self.rank] = torch.tensor([color, key, dist.get_rank()])
        rows = sorted(self.allreduce(table).tolist(), key=lambda row: row[1])
        members = {c: tuple(r for d, _, r in rows if d == c) for c in sorted({c for c, *_ in rows})}
        if self._ranks is None:
            _world().make_groups(members.values())
        return restore(members[color], self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        # A group of all ranks would be made again only where all are in equally many groups.
        if self._ranks is None or (
            dist.is_initialized() and self._ranks == tuple(range(dist.get_world_size()))
        ):
            return default_communicator, ()
        if len(self._ranks) == 1:
            return SingleProcess, ()
        return restore, (self._ranks, self.timeout)

    def __repr__(self) -> str:
        ranks = "world" if self._ranks is None else list(self._ranks)
        return f"TorchDistributed(ranks={ranks})"


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each kind of device: "cpu:gloo,cuda:nccl" is such a group's description."""
    entries = dist.get_backend_config(group).split(",")
    return dict(entry.split(":") for entry in entries)


class _Transport(Transport):
    """The processes of one group: gloo's connections of its own, or the group itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._backends = _backends(group)
        self._devices: list[Any] = []
        self._board: StoreBoard | None = None

    @property
    def board(self) -> StoreBoard:
        if self._board is None:
            self._board = StoreBoard(self._store, self.rank, self.size)
        return self._board

    @functools.cached_property
    def _store(self) -> dist.Store:
        """A part of the store in which the default group's processes have met, used by no other."""
        name = f"multibn/{self._group.group_name}"
        store = dist.distributed_c10d._get_default_store()
        # A later default group may use the same store, and give its groups the same names.
        number = dist.PrefixStore(name, store).add(f"uses by {self.rank}", 1)
        return dist.PrefixStore(f"{name}/{number}", store)

    def open_line(self, number: int, buffer: HostArray | None, timeout: float) -> Line:
        if self._backends.get("cpu") != "gloo":
            return _GroupLine(self._group, self._device())
        self._devices = self._devices or _gloo_devices()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = self._devices
        # A line has one message at a time. Threads that have slept for a while wake up slowly: with
        # three for each line, as torch makes them, a network's step takes 3 to 5 % longer.
        options._threads = 1
        # A little longer than the deadline, whose message says more. Not much: gloo's threads wait
        # so long, and keep a process that has given up from ending.
        options._timeout = timedelta(seconds=timeout + 1)
        store = dist.PrefixStore(f"line {number}", self._store)
        return _GlooLine(store, self.rank, self.size, options, buffer)

    def _device(self) -> torch.device:
        """Where the group can sum."""
        kind = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        if kind == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)

    def abort(self) -> None:
        """Torchrun ends the other ranks when it sees that this process has failed."""

    def close(self) -> None:
        # A process that ends with gloo's threads running is aborted now and then (3 of 24 in a
        # trial).
        global _latest_world
        _latest_world = None
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


class _GroupLine:
    """The user's own group, over a backend of which no second group is made."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def opened(self, seconds: float) -> bool:
        return True

    def begin(self, a: HostArray) -> Done:
        host = torch.from_numpy(a)
        x = host.to(self._device)
        work: Any = dist.all_reduce(x, group=self._group, async_op=True)

        def done(seconds: float) -> bool:
            # `work.wait` knows no deadline over some backends, and over NCCL the host does not
            # wait in it.
            if not _poll(work.is_completed, seconds):
                return False
            work.wait()
            host.copy_(x)
            return True

        return done


class _GlooLine:
    """A gloo group of its own: what DistributedDataParallel sends cannot be taken for a message."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Any, buffer: HostArray | None
    ) -> None:
        self._store, self._rank, self._size, self._options = store, rank, size, options
        self._buffer = buffer
        self._tensor = None if buffer is None else torch.from_numpy(buffer)
        self._gloo: Any = None
        self._store.add("ranks here", 1)

    def opened(self, seconds: float) -> bool:
        # Without this, connecting to a rank that does not come would end in an error of the store,
        # which does not say who is missing.
        if not _poll(lambda: self._store.add("ranks here", 0) >= self._size, seconds):
            return False
        # Not by new_group: torch names groups after the number of groups that a rank is in.
        gloo: Any = dist.ProcessGroupGloo
        self._gloo = gloo(self._store, self._rank, self._size, self._options)
        return True

    def begin(self, a: HostArray) -> Done:
        x = self._tensor if a is self._buffer else torch.from_numpy(a)
        work = self._gloo.allreduce([x])
        # Were gloo's thread the last to let go of a tensor, it would need the interpreter for that,
        # and a process that is ending by then is aborted.
        self._in_use = work, x
        return functools.partial(_wait, work)


def _gloo_devices() -> list[Any]:
    """The network interfaces that torch would choose, with a thread for each."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]


def _wait(work: Any, seconds: float) -> bool:
    """Whether gloo's work completes within that time."""
    try:
        work.wait(timedelta(seconds=max(seconds, 1e-3)))  # 0 means for ever
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the error that has ended the work
    return True


def _poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true within that time."""
    deadline = time.monotonic() + seconds
    nap = 1e-4
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(nap)
        nap = min(1.5 * nap, 0.02)
    return True


class _World:
    """What is known under one default process group; with another, all is found out anew."""

    def __init__(self) -> None:
        self.default_group = dist.group.WORLD
        self.lines: dict[dist.ProcessGroup, Lines] = {}
        # Groups made here, by their sorted ranks: torch gives a group no other order.
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Those among them that all ranks of the default group have made together.
        self.split: set[tuple[int, ...]] = set()

    def lines_of(self, group: dist.ProcessGroup) -> Lines:
        """The lines of all handles of one process group."""
        if group not in self.lines:
            self.lines[group] = Lines(_Transport(group))
            if self.default_group is _inherited:
                self.lines[group].disown()
        return self.lines[group]

    def find_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these global ranks. Collective over them when first called for them."""
        where = "no process group is initialised"
        if self.default_group is not None:
            where = f"this is rank {dist.get_rank()} of {dist.get_world_size()}"
        if (
            self.default_group is None
            or dist.get_rank() not in ranks
            or max(ranks) >= dist.get_world_size()
        ):
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
                self.groups[key] = dist.new_group(list(key))


_latest_world: _World | None = None
_inherited: dist.ProcessGroup | None = None  # in a forked child: the parent's default group


def _after_fork() -> None:
    global _inherited
    _inherited = dist.group.WORLD


os.register_at_fork(after_in_child=_after_fork)


def _world() -> _World:
    global _latest_world
    if _latest_world is None or _latest_world.default_group is not dist.group.WORLD:
        _latest_world = _World()
    return _latest_world


def restore(ranks: tuple[int, ...], timeout: float | None = None) -> TorchDistributed:
    """The processes with these ranks of the default group. Their first use is collective."""
    restored = TorchDistributed(timeout=timeout)
    restored._ranks = ranks
    return restored
