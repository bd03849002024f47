"""The communicator: processes that share batch statistics, and the handles that name them."""

import json
import sys
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np

from multibn._arrays import array_namespace
from multibn._typing import Array

_T = TypeVar("_T", bound="Handle")


@runtime_checkable
class Communicator(Protocol):
    """Processes that share batch statistics. Names and meaning are MPI's.

    `copy.deepcopy` of a layer also copies a communicator of your own class. If it holds a socket or
    a lock, define a `__deepcopy__` that returns `self`.

    Examples
    --------
    A class of one's own, for which no base class is needed:

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
    """A reference to a group of processes: copies are the same object, a pickle finds the group."""

    # Whether the processes are found anew once torch has another default process group.
    follows_default_group = False
    # Whether a layer was given the handle's `native`, a library's object, and not the handle.
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
        """Equal for handles of the same processes, as far as pickles can tell."""
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
    """Stands for another communicator, which is looked up at each use."""

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
        """The communicator that this one stands for; may itself be `Forwarding`."""
        raise NotImplementedError


class Outside(Forwarding):
    """A group that this process is not part of: a layer can have the group, and cannot train.

    `native` is what a library gives to such a process.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Outside, (self.native,)

    def __repr__(self) -> str:
        return f"Outside({self.native!r})"


def is_outsiders_marker(obj: Any, /) -> bool:
    """Whether `obj` is what a library gives to processes outside the group."""
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
    """Equal for communicators of the same processes, as far as one can tell."""
    return communicator.identity if isinstance(communicator, Handle) else id(communicator)


def gather(value: Any, communicator: Any) -> list[Any]:
    """`value`, which JSON can hold, of every rank, on every rank. Collective: two allreduces.

    For first steps and error messages, not every step. JSON is only read.
    """
    data = json.dumps(value).encode()
    rank, size = communicator.rank, communicator.size
    lengths = np.zeros(size)  # float64, which every communicator takes
    lengths[rank] = len(data)
    lengths = communicator.allreduce(lengths).astype(int)
    contents = np.zeros((size, lengths.max()))
    contents[rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    contents = communicator.allreduce(contents).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(contents, lengths, strict=True)]
