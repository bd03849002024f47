"""Part of a communicator's ranks, named by what they have in common and found at the first use."""

import hashlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from multibn._environment import host
from multibn.communicators import (
    Communicator,
    DefaultCommunicator,
    SingleProcess,
    as_communicator,
)
from multibn.communicators._handle import Forwarding, Handle

Spec: TypeAlias = str | int | tuple[int, ...]


class Group(Forwarding):
    """The group of `parent`'s ranks that this process belongs to.

    The first use, reading `rank` or `size` included, is collective over `parent`: each of its ranks
    must make it, with the same `spec` or, for lists of ranks, with its own list out of several that
    have no rank in common. Until then nothing is communicated, so that layers can be built before
    the process group exists. Groups of the same `parent` and `spec` share one communicator, however
    many layers have one. They are found anew after torch's default process group was made anew.

    Parameters
    ----------
    parent
        Anything that `multibn.as_communicator` takes, another group included:
        `Group(Group(None, "machine"), 4)` are 4 consecutive ranks inside a machine.
    spec
        `"machine"` for the ranks on the same host; an int k for k consecutive ranks, where k must
        divide the number of `parent`'s ranks; or a list of `parent`'s ranks, in the order that
        they have in the group.

    Raises
    ------
    TypeError
        If `spec` is none of these, or `parent` is no communicator.
    ValueError
        If `spec` is an int below 1, or a list that is empty or has negative or repeated ranks.
        At each use: if k does not divide the number of ranks, on all of them; if the list has a
        rank that `parent` has not; or if this process is not in the list.
    """

    def __init__(self, parent: Any, spec: Any, /) -> None:
        self.parent = as_communicator(parent)
        self.spec = _check_spec(spec)
        self._key = identity(self.parent), self.spec

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self.parent, self.spec)

    def __repr__(self) -> str:
        spec = list(self.spec) if isinstance(self.spec, tuple) else self.spec
        return f"Group({self.parent!r}, {spec!r})"

    def _find(self) -> Communicator:
        found = _found.get(self._key)
        default_group = _default_group_under(self.parent)
        if found is None or found.default_group is not default_group:
            communicator = _resolve(self.parent, self.spec)
            found = _found[self._key] = _Found(communicator, self.parent, default_group)
        if found.communicator is None:
            raise ValueError(
                f"this process, rank {self.parent.rank} of {self.parent.size}, is not in the list "
                f"of ranks: got {self!r}. Give each process a group that it belongs to."
            )
        return found.communicator


class _Found(NamedTuple):
    communicator: Communicator | None  # None for a process outside the list of ranks
    parent: Communicator  # kept, so that its id stays its own
    default_group: object


# By the identity of the parent and the spec.
_found: dict[tuple[object, Spec], _Found] = {}


def _check_spec(spec: Any) -> Spec:
    if isinstance(spec, int) and not isinstance(spec, bool):
        if spec < 1:
            raise ValueError(
                f"a group must have 1 or more consecutive ranks: got {spec}. "
                "Pass 'machine' for the ranks on the same host, None for all."
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
        return tuple(spec)
    raise TypeError(
        "a group must be 'machine', a number of consecutive ranks or a list of ranks: "
        f"got {spec!r} of type {type(spec).__qualname__}."
    )


def identity(communicator: Communicator) -> object:
    """Equal for communicators of the same processes, as far as one can tell."""
    if isinstance(communicator, Group):
        return Group, *communicator._key
    if isinstance(communicator, Handle):
        return communicator.__reduce__()  # where a pickle would find the processes
    return id(communicator)


def _default_group_under(parent: Communicator) -> object:
    """The default process group of torch, None where `parent` does not stand on it."""
    while isinstance(parent, Group):
        parent = parent.parent
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    from multibn.communicators.torch_distributed import TorchDistributed

    stands = isinstance(parent, DefaultCommunicator | TorchDistributed)
    return distributed.group.WORLD if stands else None


def _resolve(parent: Communicator, spec: Spec) -> Communicator | None:
    """This process's group, None if it has none. Collective over `parent`."""
    if isinstance(spec, tuple):
        return _listed(parent, spec)
    if isinstance(spec, int):
        return _consecutive(parent, spec)
    return _on_same_host(parent)


def _consecutive(parent: Communicator, k: int) -> Communicator:
    if k == 1:
        return SingleProcess()
    rank, size = parent.rank, parent.size
    if size % k:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"groups of {k} consecutive ranks need a number of ranks that {k} divides: got {size} "
            f"in {parent!r}, on its rank {rank}. Use {_enumerate(divisors)}."
        )
    return parent if k == size else parent.split(rank // k, rank)


def _listed(parent: Communicator, ranks: tuple[int, ...]) -> Communicator | None:
    rank, size = parent.rank, parent.size
    if max(ranks) >= size:
        raise ValueError(
            f"a list of ranks must name ranks below {size}, the number of ranks in {parent!r}: "
            f"got {list(ranks)} on rank {rank}."
        )
    if ranks == tuple(range(size)):
        return parent
    if rank not in ranks:
        parent.split(size)  # a color of no list; those in the list wait for all of `parent`
        return None
    return parent.split(min(ranks), ranks.index(rank))


def _on_same_host(parent: Communicator) -> Communicator:
    import numpy as np

    rank, size = parent.rank, parent.size
    if size == 1:
        return parent
    table = np.zeros(size, dtype=np.int64)
    # Equal on all processes, which Python's own hash of a text is not; positive in 64 bits.
    table[rank] = int.from_bytes(hashlib.sha256(host().encode()).digest()[:8], "big") >> 1
    hosts = parent.allreduce(table).tolist()
    first = hosts.index(hosts[rank])
    return parent if len(set(hosts)) == 1 else parent.split(first, rank)


def _enumerate(numbers: Iterable[int]) -> str:
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last
