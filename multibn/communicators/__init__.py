"""Processes that share batch statistics, one small file per library that moves their bytes.

Every communicator works with the arrays of every library. A group of ranks is just another
communicator; `SingleProcess` is the group of one.

Communicators are handles: a deep copy is the same handle, and a pickle records how to find the
processes again, which happens at the first use. Importing this package imports no framework.
"""

import os
import sys
import warnings
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

from multibn._arrays import array_namespace
from multibn._typing import Array
from multibn.communicators._handle import Forwarding, Handle

__all__ = ["Communicator", "DefaultCommunicator", "Group", "SingleProcess", "as_communicator"]


@runtime_checkable
class Communicator(Protocol):
    """Processes that share batch statistics. Names and meaning are MPI's."""

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


class SingleProcess(Handle):
    """This process alone."""

    rank = 0
    size = 1

    def allreduce(self, x: Array, /) -> Array:
        if hasattr(x, "clone"):  # of torch, a copy that autograd differentiates
            return x.clone()
        return array_namespace(x).asarray(x, copy=True)

    def split(self, color: int, key: int = 0) -> "SingleProcess":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleProcess, ()


class DefaultCommunicator(Forwarding):
    """torch's default process group where one is initialised, else this process alone.

    Looked up at each use, so that a layer may be built, or loaded, before the group. If there is no
    group although a launcher started several processes, the first use warns.
    """

    _warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return as_communicator, ()

    @staticmethod
    def _find() -> Communicator:
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            return _default_group()
        DefaultCommunicator._warn_if_launched()
        return SingleProcess()

    @classmethod
    def _warn_if_launched(cls) -> None:
        # OMPI_COMM_WORLD_SIZE: Open MPI; PMI_SIZE: MPICH, Intel MPI; WORLD_SIZE: torchrun.
        sizes = {
            name: int(os.environ[name])
            for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
            if os.environ.get(name, "").isdigit()
        }
        if cls._warned or max(sizes.values(), default=1) == 1:
            return
        cls._warned = True
        name, size = max(sizes.items(), key=lambda item: item[1])
        fix = (
            "call torch.distributed.init_process_group() before the first training step"
            if name == "WORLD_SIZE"
            else "pass a communicator, mpi4py.MPI.COMM_WORLD for example"
        )
        warnings.warn(
            f"batch statistics stay local to this process although the launcher started {size} "
            f"({name}={size}): no communicator was given and torch.distributed is not initialised. "
            f"To share them, {fix}; to keep them local, pass multibn.SingleProcess().",
            stacklevel=2,
        )


@cache
def _default_group() -> Communicator:
    """The same handle each time: it looks the group up itself, and holds none."""
    from multibn.communicators.torch_distributed import TorchDistributed

    return TorchDistributed()


_DEFAULT = DefaultCommunicator()


def as_communicator(obj: Any = None, /) -> Communicator:
    """The communicator that `obj` stands for.

    Parameters
    ----------
    obj
        None for torch's default process group where one is initialised when the communicator is
        used, else this process alone; of those processes, `"machine"` for the ones on this host, an
        int k for k consecutive ones, or a list of ranks, see `Group`; a torch ProcessGroup or
        one-dimensional DeviceMesh; an mpi4py Comm; a ChainerMN communicator; or a `Communicator`,
        which is returned as it is.

    Raises
    ------
    TypeError
        If `obj` is none of these.
    ValueError
        If this process is not part of the group, a DeviceMesh has several dimensions, k is below 1,
        or the list is empty or has negative or repeated ranks.
    """
    if obj is None:
        return _DEFAULT
    if isinstance(obj, Handle):  # before anything reads its rank, which may be collective
        return cast(Communicator, obj)
    # The library that an object's class comes from is known without importing that library.
    libraries = {cls.__module__.partition(".")[0] for cls in type(obj).__mro__}
    if "chainermn" in libraries:
        from multibn.communicators.chainermn import ChainerMN

        return ChainerMN(obj)
    if "mpi4py" in libraries:
        from multibn.communicators.mpi import MPI

        return MPI(obj)
    if "torch" in libraries or is_outsiders_marker(obj):
        from multibn.communicators.torch_distributed import TorchDistributed

        return TorchDistributed(obj)
    if (isinstance(obj, str) and obj == "machine") or (
        isinstance(obj, int | list | tuple) and not isinstance(obj, bool)
    ):
        return Group(None, obj)
    if isinstance(obj, Communicator):
        return obj
    raise TypeError(
        "a communicator must be None, a torch ProcessGroup or DeviceMesh, an mpi4py Comm, a "
        "ChainerMN communicator, a multibn Communicator, 'machine', a number of consecutive ranks "
        "or a list of ranks: "
        f"got {obj!r} of type {type(obj).__qualname__}."
    )


def is_outsiders_marker(obj: Any) -> bool:
    """Whether `obj` is what torch's new_group returns to processes outside the group."""
    distributed = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available():
        return False
    marker = distributed.GroupMember.NON_GROUP_MEMBER
    return type(obj) is type(marker) and obj == marker


# Made of what stands above.
from multibn.communicators.groups import Group as Group  # noqa: E402
