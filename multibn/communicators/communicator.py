"""The `Communicator` protocol, the base classes of handles, and `gather`."""

import json
import sys
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np

from multibn._arrays import array_namespace
from multibn._typing import Array

_T = TypeVar("_T", bound="Handle")


@runtime_checkable
class Communicator(Protocol):
    """Processes that share batch statistics. The methods have the names and meaning of MPI's.

    `copy.deepcopy` of a layer also copies a communicator of your own class. If it holds a socket or
    a lock, define a `__deepcopy__` that returns `self`.

    Examples
    --------
    Your own class needs no base class:

    >>> from multibn import Communicator
    >>> class Alone:
    ...     rank, size = 0, 1
    ...     def allreduce(self, x):
    ...         return x.copy()
    ...     def split(self, color, key=0):
    ...         return self
    >>> isinstance(Alone(), Communicator)
    True
    """

    @property
    def rank(self) -> int:
        """This process's number among the `size` processes."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def allreduce(self, x: Array, /) -> Array:
        """Sum `x` over the ranks.

        Collective: every rank must call it, with the same shape and dtype. Returns a new array of
        the same library, dtype and device as `x`, which is left unchanged.
        """

    def split(self, color: int, key: int = 0) -> "Communicator":
        """Communicator of the ranks that passed the same `color`, ordered by `key`, then by rank.

        Collective: every rank must call it.
        """


class Handle:
    """A reference to a group of processes: a copy is the same object, a pickle finds the group."""

    # Whether the processes are looked up again after init_process_group has run again.
    follows_default_group = False
    # Whether the user gave the layer `native`, a library's object, instead of this handle.
    is_of_native = False
    channel: Any = None  # `Channel` of the group; None for one process

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: dict[int, Any]) -> _T:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def identity(self) -> object:
        """Equal for handles whose pickles are equal: they refer to the same processes."""
        return self.__reduce__()


class SingleProcess(Handle):
    """This process alone.

    Examples
    --------
    >>> from multibn import SingleProcess
    >>> SingleProcess().size
    1
    """

    rank = 0
    size = 1

    def allreduce(self, x: Array, /) -> Array:
        """A copy of `x`."""
        if type(x) is np.ndarray:
            return x.copy()
        if hasattr(x, "clone"):  # torch: autograd differentiates a clone, not an asarray
            return x.clone()
        return array_namespace(x).asarray(x, copy=True)

    def split(self, color: int, key: int = 0) -> "SingleProcess":
        """This process alone, for any `color` and `key`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleProcess, ()


class Forwarding(Handle):
    """A handle that looks up the actual communicator at each use."""

    @property
    def rank(self) -> int:
        return int(self._look_up().rank)

    @property
    def size(self) -> int:
        return int(self._look_up().size)

    def allreduce(self, x: Array, /) -> Array:
        return self._look_up().allreduce(x)

    def split(self, color: int, key: int = 0) -> Any:
        return self._look_up().split(color, key)

    def _look_up(self) -> Any:
        """Return the actual communicator, which may itself be `Forwarding`."""
        raise NotImplementedError


class Outside(Forwarding):
    """A group that this process is not part of. A layer can hold the group but cannot train.

    `native` is the library's marker for such a process, MPI.COMM_NULL for example.
    """

    is_of_native = True

    def __init__(self, native: Any) -> None:
        self.native = native

    def _look_up(self) -> NoReturn:
        distributed, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
        rank = f"world rank {mpi.COMM_WORLD.rank}" if mpi else "this process"
        if distributed and distributed.is_available() and distributed.is_initialized():
            rank = f"rank {distributed.get_rank()} of the default group"
        raise ValueError(
            f"this process is not part of the process group: got {self.native!r} on {rank}. Give "
            "each process the group it belongs to."
        )

    def __repr__(self) -> str:
        return f"Outside({self.native!r})"


def is_outsiders_marker(obj: Any, /) -> bool:
    """Whether `obj` is a library's marker for processes outside a group."""
    mpi, distributed = sys.modules.get("mpi4py.MPI"), sys.modules.get("torch.distributed")
    if mpi and isinstance(obj, mpi.Comm):
        return bool(obj == mpi.COMM_NULL)
    if not distributed or not distributed.is_available():
        return False
    if isinstance(obj, distributed.DeviceMesh):
        return obj.get_coordinate() is None
    marker = distributed.GroupMember.NON_GROUP_MEMBER
    return type(obj) is type(marker) and bool(obj == marker)


def identity(communicator: Communicator, /) -> object:
    """Equal for handles of the same processes; other communicators equal only themselves."""
    return communicator.identity if isinstance(communicator, Handle) else id(communicator)


def gather(value: Any, communicator: Any) -> list[Any]:
    """Return the `value`s of all ranks, in rank order. Collective: two allreduces.

    Too slow for every step. `value` travels as JSON: unpickling could run code of another rank.
    """
    data = json.dumps(value).encode()
    rank, size = communicator.rank, communicator.size
    lengths = np.zeros(size)  # float64, which every communicator can sum
    lengths[rank] = len(data)
    lengths = communicator.allreduce(lengths).astype(int)
    contents = np.zeros((size, lengths.max()))
    contents[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    contents = communicator.allreduce(contents).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(contents, lengths, strict=True)]
