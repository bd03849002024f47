"""Which communicator an object stands for: `as_communicator`, and `Group` for a part of one."""

import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from multibn._platform import launched_processes, this_machine
from multibn.communicators.communicator import (
    Communicator,
    Forwarding,
    Handle,
    Outside,
    SingleProcess,
    gather,
    identity,
    is_outsiders_marker,
)
from multibn.communicators.diagnostics import warn_if_launched

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    _Part: TypeAlias = Literal["machine"] | int | list[int] | tuple[int, ...]
    CommunicatorLike: TypeAlias = Communicator | ProcessGroup | DeviceMesh | Comm | _Part | None
else:  # no framework is imported to name its classes

    class CommunicatorLike:
        """A type for annotations: what names the ranks that share, see `as_communicator`.

        None; a torch ProcessGroup or one-dimensional DeviceMesh; an mpi4py Comm; a ChainerMN
        communicator, whose library has no types, or a `Communicator`; `"machine"`, an int or a list
        of ints.

        Examples
        --------
        >>> from torch import nn
        >>> from multibn import CommunicatorLike
        >>> from multibn.torch import convert_sync_batchnorm
        >>> def build(group: CommunicatorLike = None) -> nn.Module:
        ...     return convert_sync_batchnorm(nn.BatchNorm2d(8), group)
        >>> build([0]).process_group.size
        1
        """


# The library and the name of an object's class, and the file and class that wrap such an object.
_TORCH = "torch_distributed", "TorchDistributed"
_WRAPPERS = {
    ("chainermn", "CommunicatorBase"): ("chainermn", "ChainerMN"),
    ("mpi4py", "Comm"): ("mpi", "MPI"),
    ("torch", "ProcessGroup"): _TORCH,
    ("torch", "DeviceMesh"): _TORCH,
}

_Spec: TypeAlias = str | int | tuple[int, ...]
_LOCAL = SingleProcess()


class DefaultCommunicator(Forwarding):
    """torch's default process group where one is initialised, else this process alone.

    Looked up at each use, so that a layer may be built, or loaded, before the group. If there is no
    group although a launcher started several processes, the first use warns.

    Examples
    --------
    >>> from multibn import as_communicator
    >>> as_communicator(None)
    DefaultCommunicator()
    """

    ends_with_torchs = True
    is_of_native, native = True, None

    def __reduce__(self) -> tuple[Any, ...]:
        return as_communicator, ()

    def _look_up(self) -> Communicator:
        if default_group() is not None:
            return _default_of_torch()
        fix = "pass a communicator, mpi4py.MPI.COMM_WORLD for example"
        if launched_processes()[0] == "WORLD_SIZE":
            fix = "call torch.distributed.init_process_group() before the first training step"
        why = "no communicator was given and torch.distributed is not initialised"
        warn_if_launched(why, fix)
        return _LOCAL


def default_group() -> object:
    """The default process group of torch, or None."""
    # Without the attribute where torch was built without torch.distributed.
    group = getattr(sys.modules.get("torch.distributed"), "group", None)
    return None if group is None else group.WORLD


def _wrapped(file: str, name: str, obj: Any = None) -> Communicator:
    # By name: no library need be installed.
    wrapper = getattr(import_module(f"multibn.communicators.transports.{file}"), name)
    return cast(Communicator, wrapper(obj))


_default_of_torch = cache(partial(_wrapped, *_TORCH))
_default = DefaultCommunicator()


def as_communicator(obj: CommunicatorLike = None, /) -> Communicator:
    """The communicator that `obj` stands for.

    Parameters
    ----------
    obj
        None for torch's default process group where one is initialised when the communicator is
        used, else this process alone; of those processes, `"machine"` for the ones on this machine,
        an int k for k consecutive ones, or a list of ranks, see `Group`; a torch ProcessGroup or
        one-dimensional DeviceMesh; an mpi4py Comm; a ChainerMN communicator; or a `Communicator`,
        which is returned as it is.

    Raises
    ------
    TypeError
        If `obj` is none of these.
    ValueError
        If k is below 1, or the list is empty or has negative or repeated ranks. At each use, if
        this process is not part of the group.
    RuntimeError
        If a DeviceMesh has several dimensions.

    Examples
    --------
    >>> from multibn import SingleProcess, as_communicator
    >>> as_communicator(SingleProcess())
    SingleProcess()
    >>> as_communicator().size  # no process group is initialized here
    1
    """
    if obj is None:
        return _default
    if isinstance(obj, Handle):  # before anything reads the rank, which may be collective
        return cast(Communicator, obj)
    # Without importing a library.
    if is_outsiders_marker(obj):
        return Outside(obj)
    for cls in type(obj).__mro__:
        if wrapper := _WRAPPERS.get((cls.__module__.partition(".")[0], cls.__name__)):
            return _wrapped(*wrapper, obj)
    are_ranks = isinstance(obj, int | list | tuple) and not isinstance(obj, bool)
    if are_ranks or (isinstance(obj, str) and obj == "machine"):
        return Group(None, obj)
    # Looked up without a call: reading a property may be collective.
    has_methods = any(callable(getattr_static(obj, name, 0)) for name in ("rank", "size"))
    if not has_methods and isinstance(obj, Communicator) and not isinstance(obj, type):
        return obj
    is_backend = isinstance(obj, str) and obj in ("gloo", "mpi", "nccl")
    raise TypeError(
        "a communicator must be None, a torch ProcessGroup or DeviceMesh, an mpi4py Comm, a "
        "ChainerMN communicator, a multibn Communicator (an instance, whose `rank` and `size` are "
        "numbers), 'machine', a number of consecutive ranks or a list of ranks: "
        f"got {obj!r} of type {type(obj).__qualname__}."
        + " Pass None for the default group, whatever its backend."
        * is_backend
    )


class Group(Forwarding):
    """The group of `parent`'s ranks that this process belongs to.

    The first use, reading `rank` or `size` included, is collective over `parent`: each of its ranks
    must make it, with the same `spec` or, for lists of ranks, with its own list out of several that
    have no rank in common. Until then nothing is communicated, so that layers can be built before
    the process group exists. Groups of the same `parent` and `spec` share one communicator, however
    many layers have one. They are looked up anew after torch's default process group was made anew.

    Parameters
    ----------
    parent
        Anything that `multibn.as_communicator` takes, another group included:
        `Group(Group(None, "machine"), 4)` are 4 consecutive ranks inside a machine.
    spec
        `"machine"` for the ranks on the same machine; an int k for k consecutive ranks, where k
        must divide the number of `parent`'s ranks; or a list of `parent`'s ranks, in any order: as
        in torch, the group has them in that of `parent`.

    Raises
    ------
    TypeError
        If `spec` is none of these, or `parent` is no communicator.
    ValueError
        If `spec` is an int below 1, or a list that is empty or has negative or repeated ranks.
        At each use: if k does not divide the number of ranks, on all of them; if the list has a
        rank that `parent` has not; or if this process is not in the list. At the first use of a
        list: if a rank in the list passes another one.

    Examples
    --------
    >>> from multibn import Group
    >>> pairs = Group(Group(None, "machine"), 2)  # ranks 0 and 1 of each machine, 2 and 3, ...
    >>> pairs
    Group(Group(DefaultCommunicator(), 'machine'), 2)
    >>> Group(None, "machine").size  # no process group is initialized here
    1
    """

    def __init__(self, parent: CommunicatorLike, spec: Any, /) -> None:
        self.parent = as_communicator(parent)
        self.spec = _checked(spec)
        self._key = identity(self.parent), self.spec
        self.ends_with_torchs = getattr(self.parent, "ends_with_torchs", False)

    @property
    def identity(self) -> object:
        return Group, *self._key

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self.parent, self.spec)

    def __repr__(self) -> str:
        spec = list(self.spec) if isinstance(self.spec, tuple) else self.spec
        return f"Group({self.parent!r}, {spec!r})"

    def _look_up(self) -> Communicator:
        resolved = _resolved.get(self._key)
        world = default_group() if self.ends_with_torchs else None
        if resolved is None or resolved.default_group() is not world:
            # A destroyed group, its threads and its connections can end.
            reference = weakref.ref(world) if world else lambda: None
            for spec, communicator in self._split().items():
                _resolved[self._key[0], spec] = _Resolved(communicator, self.parent, reference)
            resolved = _resolved[self._key]
        if resolved.communicator is None:
            raise ValueError(
                f"this process, rank {self.parent.rank} of {self.parent.size}, is not in the list "
                f"of ranks: got {self!r}. Give each process a group that it belongs to."
            )
        # As this handle of the parent: another one's group may have been destroyed.
        return self.parent if resolved.communicator is resolved.parent else resolved.communicator

    def _split(self) -> "dict[_Spec, Communicator | None]":
        """This process's group, by its spec, and other lists that ranks have passed meanwhile.

        None for lists that leave this process out. Collective over `parent`.
        """
        if isinstance(self.spec, tuple):
            return _listed(self.parent, self.spec)
        if isinstance(self.spec, int):
            return {self.spec: _consecutive(self.parent, self.spec)}
        return {self.spec: _on_same_machine(self.parent)}


class _Resolved(NamedTuple):
    communicator: Communicator | None  # None for a process outside the list of ranks
    parent: Communicator  # a reference, so that no other object gets its id
    default_group: Callable[[], object]


# The groups of this process, by the identity of the parent and the spec.
_resolved: dict[tuple[object, _Spec], _Resolved] = {}


def _checked(spec: Any) -> _Spec:
    """The spec of a `Group`, which can be a key."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        if spec < 1:
            raise ValueError(
                f"a group must have 1 or more consecutive ranks: got {spec}. "
                "Pass 'machine' for the ranks on the same machine, None for all."
            )
        return spec
    if isinstance(spec, str) and spec == "machine":
        return spec
    if isinstance(spec, list | tuple) and all(
        isinstance(r, int) and not isinstance(r, bool) for r in spec
    ):
        if not spec or min(spec) < 0 or len(set(spec)) < len(spec):
            raise ValueError(
                f"a list of ranks must name 1 or more, none below 0 and none twice: got {spec}."
            )
        return tuple(sorted(spec))
    raise TypeError(
        "a group must be 'machine', a number of consecutive ranks or a list of ranks: "
        f"got {spec!r} of type {type(spec).__qualname__}."
    )


def _consecutive(parent: Communicator, k: int) -> Communicator:
    if k == 1:
        return SingleProcess()
    rank, size = parent.rank, parent.size
    if size % k:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"groups of {k} consecutive ranks need a number of ranks that {k} divides: got {size} "
            f"in {parent!r}, on its rank {rank}. Use one of {divisors}, in `process_group`, "
            "`num_sync_devices` or cfg.BN.NUM_SYNC_DEVICES."
        )
    return parent if k == size else parent.split(rank // k, rank)


def _listed(parent: Communicator, ranks: tuple[int, ...]) -> dict[_Spec, Communicator | None]:
    rank, size = parent.rank, parent.size
    if ranks[-1] >= size:
        raise ValueError(
            f"a list of ranks must name ranks below {size}, the number of ranks in {parent!r}: "
            f"got {list(ranks)} on rank {rank}."
        )
    if ranks == tuple(range(size)):
        return {ranks: parent if size > 1 else SingleProcess()}
    # All ranks then know the same groups, and ask each other at the same uses of other lists.
    lists = [tuple(each) for each in gather(ranks if rank in ranks else (), parent)]
    alone = [member for member, each in enumerate(lists) if any(lists[r] != each for r in each)]
    if alone:
        raise ValueError(
            "all ranks of a list must pass this list: some ranks in the lists of rank(s) "
            f"{alone} of {parent!r} pass others. Got {list(ranks)} on rank {rank}."
        )
    groups: dict[_Spec, Communicator | None] = dict.fromkeys((*filter(None, lists), ranks))
    if rank in ranks:
        groups[ranks] = parent.split(ranks[0], rank)
    else:
        parent.split(size)  # no list has this color; the ranks in lists wait for all of `parent`
    return groups


def _on_same_machine(parent: Communicator) -> Communicator:
    if parent.size == 1:
        return parent
    machines = gather(this_machine(), parent)
    first = machines.index(machines[parent.rank])
    return parent if len(set(machines)) == 1 else parent.split(first, parent.rank)
