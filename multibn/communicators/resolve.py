"""Turn objects into communicators (`as_communicator`), and split communicators (`Group`)."""

import sys
import weakref
from collections.abc import Callable, MutableMapping
from functools import cache, partial
from importlib import import_module
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

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

    _Part: TypeAlias = Literal["machine"] | int
    CommunicatorLike: TypeAlias = Communicator | ProcessGroup | DeviceMesh | Comm | _Part | None
else:  # no framework is imported to name its classes

    class CommunicatorLike:
        """Anything that `as_communicator` accepts, for type annotations.

        None; a torch ProcessGroup or one-dimensional DeviceMesh; an mpi4py Comm; a ChainerMN
        communicator, whose library has no types, or a `Communicator`; `"machine"` or an int.

        Examples
        --------
        >>> from torch import nn
        >>> from multibn import CommunicatorLike
        >>> from multibn.torch import convert_sync_batchnorm
        >>> def build(group: CommunicatorLike = None) -> nn.Module:
        ...     return convert_sync_batchnorm(nn.BatchNorm2d(8), group)
        >>> build("machine").process_group.size
        1
        """


# Maps (library, class name) of a user's object to (file, class) of the communicator that wraps it.
_TORCH = "torch_distributed", "TorchDistributed"
_WRAPPERS = {
    ("chainermn", "CommunicatorBase"): ("chainermn", "ChainerMN"),
    ("mpi4py", "Comm"): ("mpi", "MPI"),
    ("torch", "ProcessGroup"): _TORCH,
    ("torch", "DeviceMesh"): _TORCH,
}

_LOCAL = SingleProcess()


class DefaultCommunicator(Forwarding):
    """torch's default process group if one is initialized; otherwise this process alone.

    The group is looked up at each use, so a layer may be built or loaded before
    `init_process_group`. If a launcher started several processes and there is no group, the first
    use warns.

    Examples
    --------
    >>> from multibn import as_communicator
    >>> as_communicator(None)
    DefaultCommunicator()
    """

    follows_default_group = True
    is_of_native, native = True, None

    def __reduce__(self) -> tuple[Any, ...]:
        return as_communicator, ()

    def _look_up(self) -> Communicator:
        if default_group() is not None:
            return _default_of_torch()
        fix = "pass a communicator, mpi4py.MPI.COMM_WORLD for example"
        if launched_processes()[0] == "WORLD_SIZE":
            fix = "call torch.distributed.init_process_group() before the first training step"
        warn_if_launched("no communicator was given and torch.distributed is not initialised", fix)
        return _LOCAL


def default_group() -> object:
    """Return torch's default process group, or None."""
    # The attribute is missing if torch was built without distributed support.
    group = getattr(sys.modules.get("torch.distributed"), "group", None)
    return None if group is None else group.WORLD


class World:
    """The groups under one default process group; a different default group gets a new `World`."""

    def __init__(self, group: object) -> None:
        # Weak, so that a destroyed group can release its threads and connections.
        self.group: Callable[[], object] = weakref.ref(group) if group else lambda: None
        self.resolved: dict[object, tuple[Communicator, Communicator]] = {}  # see `Group`
        self.channels: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()  # by process group
        # Groups made by multibn, by their sorted ranks, which is the order in torch.
        self.made: MutableMapping[tuple[int, ...], Any] = weakref.WeakValueDictionary()
        # Keys of the groups that all ranks of the default group have created together.
        self.split: set[tuple[int, ...]] = set()


_world = World(None)


def world() -> World:
    """Return the groups under the current default process group."""
    global _world
    group = default_group()
    if _world.group() is not group:
        _world = World(group)
    return _world


def _wrapped(file: str, name: str, obj: Any = None) -> Communicator:
    # Import by name, so that no library has to be installed.
    wrapper = getattr(import_module(f"multibn.communicators.transports.{file}"), name)
    return cast(Communicator, wrapper(obj))


# Maps (identity of the parent, spec) to (group, parent) for parents that are not torch's. The
# reference to the parent keeps its id from being reused.
_resolved: dict[object, tuple[Communicator, Communicator]] = {}
_default_of_torch = cache(partial(_wrapped, *_TORCH))
_default = DefaultCommunicator()


def as_communicator(obj: CommunicatorLike = None, /) -> Communicator:
    """The communicator that `obj` stands for.

    Parameters
    ----------
    obj
        One of

        - None: torch's default process group if one is initialized when the communicator is used;
          otherwise this process alone;
        - `"machine"` or an int k: of the ranks of None, those on this machine, or k consecutive
          ones; see `Group`;
        - a torch ProcessGroup or one-dimensional DeviceMesh, an mpi4py Comm, a ChainerMN
          communicator;
        - a `Communicator`, which is returned as it is.

    Raises
    ------
    TypeError
        If `obj` is none of these.
    ValueError
        If k is below 1. At each use, if this process is not part of the group.
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
    # The checks below import no library.
    if is_outsiders_marker(obj):
        return Outside(obj)
    for cls in type(obj).__mro__:
        if wrapper := _WRAPPERS.get((cls.__module__.partition(".")[0], cls.__name__)):
            return _wrapped(*wrapper, obj)
    if _is_spec(obj):
        return Group(None, obj)
    # `getattr_static` runs no property, which may be collective.
    has_methods = any(callable(getattr_static(obj, name, 0)) for name in ("rank", "size"))
    if not has_methods and isinstance(obj, Communicator) and not isinstance(obj, type):
        return obj
    is_backend = isinstance(obj, str) and obj in ("gloo", "mpi", "nccl")
    raise TypeError(
        "a communicator must be None, a torch ProcessGroup or DeviceMesh, an mpi4py Comm, a "
        "ChainerMN communicator, a multibn Communicator (an instance, whose `rank` and `size` are "
        "numbers), 'machine' or a number of consecutive ranks: "
        f"got {obj!r} of type {type(obj).__qualname__}."
        + " Pass None for the default group, whatever its backend." * is_backend
        + _LIST_ADVICE * isinstance(obj, list | tuple)
    )


class Group(Forwarding):
    """The group of `parent`'s ranks that this process belongs to.

    The first use, which may be reading `rank` or `size`, is collective over `parent`: all ranks of
    `parent` must make it, with the same `spec`. Nothing is communicated before, so layers can be
    built before the process group exists. Groups of the same `parent` and `spec` share one
    communicator. Groups are looked up again after `init_process_group` has run again.

    Parameters
    ----------
    parent
        Anything that `multibn.as_communicator` takes, another group included:
        `Group(Group(None, "machine"), 4)` are 4 consecutive ranks inside a machine.
    spec
        `"machine"` for the ranks on the same machine; or an int k for k consecutive ranks. The size
        of `parent` must be divisible by k.

    Raises
    ------
    TypeError
        If `spec` is none of these, or `parent` is no communicator.
    ValueError
        If `spec` is an int below 1. At each use, on all ranks, if `parent.size` is not divisible by
        k.

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
        if not _is_spec(spec):
            raise TypeError(
                f"a group must be 'machine' or a number of consecutive ranks: got {spec!r} of type "
                f"{type(spec).__qualname__}." + _LIST_ADVICE * isinstance(spec, list | tuple)
            )
        if spec != "machine" and spec < 1:
            raise ValueError(
                f"a group must have 1 or more consecutive ranks: got {spec}. "
                "Pass 'machine' for the ranks on the same machine, None for all."
            )
        self.spec: str | int = spec
        self._key = identity(self.parent), self.spec
        self.follows_default_group = getattr(self.parent, "follows_default_group", False)

    @property
    def identity(self) -> object:
        return Group, *self._key

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self.parent, self.spec)

    def __repr__(self) -> str:
        return f"Group({self.parent!r}, {self.spec!r})"

    def _look_up(self) -> Communicator:
        table = world().resolved if self.follows_default_group else _resolved
        if self._key not in table:
            whole, spec = self.parent, self.spec
            part = _consecutive(whole, spec) if isinstance(spec, int) else _on_same_machine(whole)
            table[self._key] = part, whole
        found, parent = table[self._key]
        # Return this object's parent: the process group of the parent in the table, although
        # identical, may have been destroyed.
        return self.parent if found is parent else found


def _is_spec(obj: Any) -> bool:
    if isinstance(obj, str):
        return obj == "machine"
    return isinstance(obj, int) and not isinstance(obj, bool)


_LIST_ADVICE = (
    " For a list of ranks, pass torch.distributed.new_group(ranks), or with mpi4py "
    "comm.Create_group(comm.group.Incl(ranks))."
)


def _consecutive(parent: Communicator, k: int) -> Communicator:
    if k == 1:
        return SingleProcess()
    rank, size = parent.rank, parent.size
    if size % k:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"the number of ranks must be divisible by the group size {k}: got {size} in "
            f"{parent!r}, on its rank {rank}. Use one of {divisors}, in `process_group`, "
            "`num_sync_devices` or cfg.BN.NUM_SYNC_DEVICES."
        )
    return parent if k == size else parent.split(rank // k, rank)


def _on_same_machine(parent: Communicator) -> Communicator:
    if parent.size == 1:
        return parent
    machines = gather(this_machine(), parent)
    first = machines.index(machines[parent.rank])
    return parent if len(set(machines)) == 1 else parent.split(first, parent.rank)
