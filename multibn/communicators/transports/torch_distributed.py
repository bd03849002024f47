"""Communicator over torch.distributed, with gloo, nccl or any other backend."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from array_api_compat import is_cupy_array, is_torch_array

from multibn._typing import Array, HostArray
from multibn.communicators.channel import Begin, Channel, ChannelCommunicator, Transport
from multibn.communicators.communicator import SingleProcess, gather, is_outsiders_marker
from multibn.communicators.diagnostics import warn_if_launched
from multibn.communicators.exit import inherited, release_gil_at_exit
from multibn.communicators.polling import Poll, barrier, chain
from multibn.communicators.resolve import as_communicator, world
from multibn.communicators.transports import gloo, shared_memory
from multibn.communicators.transports.store import StoreStatusBoard, part_of_store


class TorchDistributed(ChannelCommunicator):
    """The processes of a torch ProcessGroup.

    Arrays on a GPU are summed there by the group's GPU backend, NCCL for example; with gloo, they
    go through host memory. Arrays in host memory travel through shared memory if all ranks are on
    one machine, and otherwise through a private gloo group, separate from the program's messages.
    They travel through the process group itself only if it has no CPU backend. Sums on a GPU have
    the timeout of the process group, not MULTIBN_TIMEOUT. `destroy_process_group(group)` also frees
    the memory and the connections that multibn has opened for the group.

    Parameters
    ----------
    group
        A ProcessGroup, a one-dimensional DeviceMesh, or None for the default process group.

    Raises
    ------
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

    follows_default_group = True

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "a process group must be a torch ProcessGroup, a DeviceMesh or None: "
                f"got {group!r} of type {type(group).__qualname__}."
            )
        self._group = _reference(group)
        # Global ranks in the order of the group's ranks; None for the default group.
        self._ranks: tuple[int, ...] | None = None
        self._world = None if group is None else world()  # under which `_group` was created
        if group is not None and group is not dist.group.WORLD:
            self._ranks = tuple(dist.get_process_group_ranks(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The ProcessGroup."""
        if self._ranks is None:
            # init_process_group may have run again since the last use.
            return dist.group.WORLD or dist.distributed_c10d._get_default_group()
        existing = self.existing_group
        if existing is None:
            if dist.is_initialized() and self._world is world():
                raise RuntimeError(
                    f"the process group of ranks {list(self._ranks)} was destroyed. Give the layer "
                    "another one."
                )
            existing = find_group(self._ranks)
            self._world, self._group = world(), _reference(existing)
        return existing

    @property
    def existing_group(self) -> dist.ProcessGroup | None:
        """The ProcessGroup if it has been created already, otherwise None. Not collective."""
        if self._ranks is None:
            return dist.group.WORLD
        # A group ends with the default process group under which it was created.
        return self._group() if self._world is world() else None

    @property
    def native(self) -> Any:
        """The ProcessGroup, or this handle if the group was destroyed."""
        return self.existing_group or self

    @property
    def rank(self) -> int:
        rank = dist.get_rank()
        return rank if self._ranks is None else self._ranks.index(rank)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def channel(self) -> Channel:
        group, channels = self.group, world().channels
        channel: Channel | None = channels.get(group)
        if channel is None:
            release_gil_at_exit()
            channel = channels[group] = Channel(_Transport(group))
            # destroy_process_group calls no hook, but drops its reference.
            weakref.finalize(group, channel.close).atexit = False
            if dist.group.WORLD in inherited:
                channel.abandon_after_fork()
        return channel

    def reduces_on_device(self, x: Array, /) -> bool:
        kind = "cuda" if is_cupy_array(x) else x.device.type if is_torch_array(x) else "cpu"
        # gloo would also copy CUDA tensors to host memory, but wait without a deadline.
        return kind != "cpu" and _backends(self.group).get(kind, "gloo") != "gloo"

    def allreduce_on_device(self, x: Array, /) -> Array:
        if is_cupy_array(x):
            import cupy

            return cupy.from_dlpack(self.allreduce_on_device(torch.from_dlpack(x)))
        return self.allreduce_in_place(x.detach().clone(memory_format=torch.contiguous_format))

    def allreduce_in_place(self, x: Array, /) -> Array:
        """Sum as `allreduce_on_device` does, but overwrite `x`."""
        # Like dist.all_reduce, but without its slow checks of the group and the tensor.
        work = self.group.allreduce([x], _SUM)
        if work is not None:  # the backend ignores `asyncOp`
            work.wait()
        return x

    def split(self, color: int, key: int = 0) -> "TorchDistributed":
        rows = sorted(gather((int(color), int(key), self.rank, dist.get_rank()), self))
        members = {c: tuple(r for *_, r in part) for c, part in groupby(rows, itemgetter(0))}
        # All ranks of the default group take part, and create every group together.
        for group_ranks in members.values() if self._ranks is None else ():
            in_order = tuple(sorted(group_ranks))
            # `world().made` cannot decide: only some ranks may have the group from another call.
            if in_order not in world().split:
                world().split.add(in_order)
                group = dist.new_group(list(in_order))
                if not is_outsiders_marker(group):
                    world().made[in_order] = group
        return restore(members[color])

    def __reduce__(self) -> tuple[Any, ...]:
        # A group of all ranks becomes the default group, to avoid `new_group` (see `find_group`).
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
    """Return a weak reference, so that a destroyed group can release its resources."""
    return (lambda: None) if group is None else weakref.ref(group)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type, parsed from "cpu:gloo,cuda:nccl" for example."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


class _Transport(Transport):
    """Transport of one group: shared memory, a private gloo group, or the group itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if dist.get_world_size() == 1:
            fix = "pass init_process_group() the launcher's world_size and rank"
            warn_if_launched("torch.distributed has 1 process", fix)
        self._group = _reference(group)
        self._backends = _backends(group)
        self._name = group.group_name
        self.board: StoreStatusBoard | None = None
        self._shared_memory: shared_memory.SharedMemory | None = None
        self._private_gloo: gloo.PrivateGloo | None = None

    def open(self) -> Iterator[Poll | None]:
        store = part_of_store(dist.distributed_c10d._get_default_store(), self._name, self.size)
        self.board = StoreStatusBoard(store, self.rank)
        yield barrier(store, self.size)
        carrier, room = "nccl", gloo.BLOCK_NUMBERS
        # No gloo for a group without a CPU backend: its network may work only for NCCL.
        if "cpu" in self._backends and dist.is_gloo_available():
            side = dist.PrefixStore("side", store)
            self._private_gloo = gloo.PrivateGloo(side, self.rank, self.size)
            machine = dist.PrefixStore("machine", store)
            created = shared_memory.create_shared_memory(machine, self.rank, self.size)
            self._shared_memory = yield from created
            if self._shared_memory is None:
                carrier = "gloo"
                yield from self._private_gloo.connect()
            else:
                carrier, room = "shared memory", shared_memory.SLOT_NUMBERS
        self.block, self.carrier = np.zeros(room), carrier

    def prepare_block(self, n: int) -> Begin:
        # Only shared memory allows different lengths on different ranks.
        return self.prepare(self.block if self._shared_memory is None else self.block[:n])

    def prepare(self, a: HostArray) -> Begin:
        begin = None if self._shared_memory is None else self._shared_memory.prepare(a)
        return begin or (lambda: chain(self._sum_by_backend(a)))

    def _sum_by_backend(self, a: HostArray) -> Iterator[Poll]:
        if self._private_gloo is None:
            start = gloo.allreduce_in_group(self._group, self._device())
        else:
            yield from self._private_gloo.connect()
            start = self._private_gloo.start
        yield from gloo.allreduce_any_dtype(a, start)

    def _device(self) -> torch.device:
        """Return the device for sums in the group. A `LayerPhase` has set the current GPU."""
        kind = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        if kind == "cuda":
            bound: Any = getattr(self._group(), "bound_device_id", None)
            return bound or torch.device("cuda", torch.cuda.current_device())
        return torch.device(kind)

    def close(self, *, failed: bool, at_exit: bool = False) -> None:
        if self.board is not None and not failed:  # the network may be broken after a failure
            if at_exit:
                self.board.finish()
            # torch prints a stack trace if the process that hosts the store has ended.
            elif dist.is_initialized():
                self.board.clear(self.size)
        if self._private_gloo is not None:
            self._private_gloo.close(failed=failed)
        if self._shared_memory is not None:
            self._shared_memory.close(failed=failed)
            self._shared_memory = None

    def end_process(self, *, failed: bool) -> None:
        # torchrun ends the other ranks if this process fails. Destroy gloo groups: a process that
        # exits while gloo's threads run sometimes aborts (3 of 24 in a trial).
        world().channels.clear()
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


def find_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of these global ranks. Collective over these ranks in the first call."""
    where, size = "no process group is initialised", 0
    remedy = "Call torch.distributed.init_process_group() first."
    if dist.is_initialized():
        size = dist.get_world_size()
        where = f"this is rank {dist.get_rank()} of {size}"
        remedy = "Give the layer another communicator, None for the default one."
    if max(ranks) >= size or dist.get_rank() not in ranks:
        raise RuntimeError(
            f"the communicator was made for ranks {list(ranks)} of torch.distributed, and "
            f"{where}. {remedy}"
        )
    key = tuple(sorted(ranks))
    made = world().made
    if key not in made:
        # torch names the group by how many groups each rank is in: these numbers must agree.
        made[key] = dist.new_group(list(key), use_local_synchronization=True)
    found: dist.ProcessGroup = made[key]
    return found


_SUM = dist.AllreduceOptions()
_SUM.asyncOp = False  # sums in the current stream


def restore(ranks: tuple[int, ...]) -> TorchDistributed:
    """Return the communicator of these global ranks. Its first use is collective."""
    restored = TorchDistributed()
    restored._ranks = ranks
    return restored
