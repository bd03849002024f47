"""Communicator over torch.distributed: gloo, nccl, or any other backend."""

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array
from multibn.communicators import SingleProcess, as_communicator, is_outsiders_marker
from multibn.communicators._handle import Watched
from multibn.communicators._host import allgather_bytes, from_host, to_host
from multibn.communicators._watch import Notice, Watch, check_timeout, default_timeout

_ANSWER = 0.3  # seconds that a store may take
_LAST_ANSWER = 15.0  # before this process ends: TCP is slow to find out that a network is back


class TorchDistributed(Watched):
    """The processes of a torch ProcessGroup.

    Tensors are reduced on their own device where the group's backend can, and otherwise on one
    where it can; NumPy and CuPy arrays become tensors for the way. What gloo moves travels in
    groups of its own, of the same ranks, where no other message can be taken for it.

    Parameters
    ----------
    group
        A ProcessGroup, a one-dimensional DeviceMesh, or None for the default process group.
    timeout
        Seconds that a collective over gloo may take; default: MULTIBN_TIMEOUT, or 300. Other
        backends have a watchdog of their own, with the group's timeout.

    Raises
    ------
    ValueError
        If this process is not part of the group, a DeviceMesh has several dimensions, or `timeout`
        is not positive.
    TypeError
        If `group` is another object.
    """

    def __init__(self, group: Any = None, *, timeout: float | None = None) -> None:
        self.timeout = default_timeout() if timeout is None else check_timeout(timeout)
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
        self._made_under = None if group is None else dist.group.WORLD
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

    def allreduce_in(self, x: Array, /, *, channel: int, place: str, text: object) -> Array:
        if is_torch_array(x):
            return self._allreduce(x, channel, place, text)
        if is_cupy_array(x):
            import cupy

            tensor = torch.from_dlpack(x)
            return cupy.from_dlpack(self._allreduce(tensor, channel, place, text))
        tensor = torch.from_numpy(to_host(x).copy())  # it may be read-only
        return from_host(self._allreduce(tensor, channel, place, text).numpy(), x)

    @property
    def agreements(self) -> dict[Any, Any]:
        return _links(self.group, self.timeout).agreements

    def split(self, color: int, key: int = 0) -> "TorchDistributed":
        table = torch.zeros((self.size, 3), dtype=torch.int64)
        table[self.rank] = torch.tensor([color, key, dist.get_rank()])
        rows = sorted(self.allreduce(table).tolist(), key=lambda row: row[1])
        members = {c: tuple(r for d, _, r in rows if d == c) for c in sorted({c for c, *_ in rows})}
        if self._ranks is None:
            for ranks in members.values():
                _make_group(ranks)
        return _restore(members[color], self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._ranks is None:
            return as_communicator, ()
        if len(self._ranks) == 1:
            return SingleProcess, ()
        return _restore, (self._ranks, self.timeout)

    def __repr__(self) -> str:
        ranks = "world" if self._ranks is None else list(self._ranks)
        return f"TorchDistributed(ranks={ranks})"

    def _allreduce(self, x: torch.Tensor, channel: int, place: str, text: object) -> torch.Tensor:
        links = _links(self.group, self.timeout)
        device = links.transport_device(x.device)
        out = x.detach().to(device, copy=True).contiguous()
        if device.type == "cpu" and links.backends["cpu"] == "gloo":
            links.allreduce_(out, channel, place, text, self.timeout)
        else:
            dist.all_reduce(out, group=self.group)
        return out.to(x.device)


class _Links:
    """What all handles of one process group have in common: its channels and its watch."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        # "cpu:gloo,cuda:nccl" for a group with a backend per device
        self.backends = dict(
            entry.split(":") for entry in dist.get_backend_config(group).split(",")
        )
        self.watch = Watch(dist.get_rank(group), dist.get_world_size(group))
        self.board: _Board | None = None
        self.agreements: dict[Any, Any] = {}
        self._name = f"multibn/{group.group_name}"
        self._channels: dict[int, dist.ProcessGroupGloo] = {}
        self._devices: list[Any] = []
        self._in_use: dict[int, Any] = {}
        if self.backends.get("cpu") == "gloo":
            self.watch.introduce(
                lambda data: allgather_bytes(
                    lambda a: self._sum(a, timeout), self.watch.rank, self.watch.size, data
                ),
                self._open_board,
            )

    def _open_board(self, name: str) -> "_Board":
        self.board = _Board(f"{self._name}/{name}", self.watch.rank, self.watch.size)
        return self.board

    def transport_device(self, device: torch.device) -> torch.device:
        """Where the group can reduce what lies on `device`."""
        if device.type in self.backends:
            return device
        kind = next(iter(self.backends))
        return (
            torch.device("cuda", torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )

    def allreduce_(
        self, x: torch.Tensor, channel: int, place: str, text: object, timeout: float
    ) -> None:
        """Sum `x` in place, over gloo."""
        if channel not in self._channels:
            self._channels[channel] = self._open_channel(channel, timeout)
        gloo: Any = self._channels[channel]

        def begin() -> Callable[[float], bool]:
            work = gloo.allreduce([x])
            # Were gloo's thread the last to let go of a tensor, it would need the interpreter for
            # it, and a process that is ending by then is aborted.
            self._in_use[channel] = work, x
            return lambda seconds: _wait(work, seconds)

        self.watch.wait(begin, place, text, timeout)

    def _open_channel(self, channel: int, timeout: float) -> Any:
        # Threads that have slept for a while wake up slowly: with three of its own for each
        # channel, as torch makes them, a network's step takes 3 to 5 % longer.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = self._devices = self._devices or _gloo_devices()
        options._threads = 1  # a channel has one message at a time
        # Its own timeout is after ours, which says more, but only a little: gloo's threads wait
        # until then, and keep a process that has given up from ending.
        options._timeout = timedelta(seconds=timeout + 1)
        # Made without torch's register of groups, whose names depend on what other groups a rank is
        # in.
        store = dist.PrefixStore(f"{self._name}/{channel}", _store())
        return gloo(store, self.watch.rank, self.watch.size, options)

    def _sum(self, a: Any, timeout: float) -> Any:
        x = torch.from_numpy(a)
        self.allreduce_(x, 0, "introduction", "the first exchange", timeout)
        return a


def _gloo_devices() -> list[Any]:
    """The network interfaces that torch would choose, with a thread for each."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]


def _wait(work: Any, seconds: float) -> bool:
    """Whether it completes within that time."""
    try:
        work.wait(timedelta(seconds=max(seconds, 1e-3)))  # 0 means for ever
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what has ended it
    return True


class _Board:
    """Notices as entries of the store that the process group was made with.

    In a thread, because a store beyond a broken network gives no answer, and knows no deadline.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._store = dist.PrefixStore(name, _store())
        self._others = [r for r in range(size) if r != rank]
        self._rank = rank
        self._notices: dict[int, Notice] = {}
        self._thread: threading.Thread | None = None

    def publish(self, notice: Notice, /) -> None:
        self._attempt(lambda: self._store.set(str(self._rank), notice.encode().decode()))

    def read(self) -> dict[int, Notice]:
        self._attempt(self._read)
        return dict(self._notices)

    def finish(self) -> None:
        """Wait for what the store has been asked.

        Python lets a thread unwind that comes back while the interpreter ends, which C++ takes for
        an error: it aborts the process.
        """
        if self._thread is not None:
            self._thread.join(_LAST_ANSWER)

    def _read(self) -> None:
        for rank in self._others:
            if self._store.check([str(rank)]):
                self._notices[rank] = Notice.decode(self._store.get(str(rank)))

    def _attempt(self, task: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
                task()

        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=run, daemon=True)
            self._thread.start()
            self._thread.join(_ANSWER)


def _store() -> dist.Store:
    """Where the processes of the default group have found each other."""
    return dist.distributed_c10d._get_default_store()


# By process group, with the default group they were made under: a new one voids them.
_all_links: dict[dist.ProcessGroup, tuple[Any, _Links]] = {}


def _links(group: dist.ProcessGroup, timeout: float) -> _Links:
    """Collective over `group` when it is first called for it."""
    world = dist.group.WORLD
    made_under, links = _all_links.get(group, (None, None))
    if links is None or made_under is not world:
        if not _all_links:
            atexit.register(_leave)
        for other in [g for g, (under, _) in _all_links.items() if under is not world]:
            del _all_links[other]
        links = _Links(group, timeout)
        _all_links[group] = world, links
    return links


def _leave() -> None:
    """At exit: nobody may be left to wait for this process, and no thread of gloo may be left."""
    for _, links in _all_links.values():
        if links.board is not None and links.watch.failure is None:
            links.board.finish()
            links.watch.leave()
            links.board.finish()
    # A process that ends with gloo's threads running is aborted now and then (3 of 24 in a trial).
    _all_links.clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


# Groups made here, by their sorted ranks (torch gives a group no other order), with the default
# group they were made under: a new one voids them.
_groups: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}
# The default group under which all of its ranks last made a group of these ranks together.
_split_under: dict[tuple[int, ...], Any] = {}


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
        # torch names it after the number of groups that a rank is in, which must be the same.
        group = dist.new_group(list(key), use_local_synchronization=True)
        _groups[key] = world, group
    return group


def _make_group(ranks: Sequence[int]) -> None:
    """Make the process group of these global ranks known. Collective over all ranks."""
    key = tuple(sorted(ranks))
    # Not asked of `_groups`, which may know more on a rank inside of the group.
    if _split_under.get(key) is not dist.group.WORLD:
        _split_under[key] = dist.group.WORLD
        _groups[key] = dist.group.WORLD, dist.new_group(list(key))


def _restore(ranks: tuple[int, ...], timeout: float) -> TorchDistributed:
    restored = TorchDistributed(timeout=timeout)
    restored._ranks = ranks
    return restored
