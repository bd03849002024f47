"""Parts of a communicator: the ranks of one machine, consecutive ranks, a list of ranks."""

from typing import Any, TypeAlias

from multibn._environment import this_machine
from multibn.communicators.base import Communicator, SingleProcess
from multibn.communicators.objects import gather

Spec: TypeAlias = str | int | tuple[int, ...]


def check_spec(spec: Any, /) -> Spec:
    """`spec` as `split_by` takes it; raises as `lookup.Group`."""
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
        return tuple(spec)
    raise TypeError(
        "a group must be 'machine', a number of consecutive ranks or a list of ranks: "
        f"got {spec!r} of type {type(spec).__qualname__}."
    )


def split_by(parent: Communicator, spec: Spec, /) -> dict[Spec, Communicator | None]:
    """This process's group, by its spec, and other lists that ranks have passed meanwhile.

    None for lists that leave this process out. Collective over `parent`; raises as `lookup.Group`.
    """
    if isinstance(spec, tuple):
        return _listed(parent, spec)
    if isinstance(spec, int):
        return {spec: _consecutive(parent, spec)}
    return {spec: _on_same_machine(parent)}


def _consecutive(parent: Communicator, k: int) -> Communicator:
    if k == 1:
        return SingleProcess()
    rank, size = parent.rank, parent.size
    if size % k:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"groups of {k} consecutive ranks need a number of ranks that {k} divides: got {size} "
            f"in {parent!r}, on its rank {rank}. Use one of {divisors}."
        )
    return parent if k == size else parent.split(rank // k, rank)


def _listed(parent: Communicator, ranks: tuple[int, ...]) -> dict[Spec, Communicator | None]:
    rank, size = parent.rank, parent.size
    if max(ranks) >= size:
        raise ValueError(
            f"a list of ranks must name ranks below {size}, the number of ranks in {parent!r}: "
            f"got {list(ranks)} on rank {rank}."
        )
    if ranks == tuple(range(size)):
        return {ranks: parent}
    # All ranks then know the same groups, and ask each other at the same uses of other lists.
    lists = [tuple(each) for each in gather(ranks if rank in ranks else (), parent)]
    alone = [member for member, each in enumerate(lists) if any(lists[r] != each for r in each)]
    if alone:
        raise ValueError(
            "all ranks of a list must pass this list: some ranks in the lists of rank(s) "
            f"{alone} of {parent!r} pass others. Got {list(ranks)} on rank {rank}."
        )
    groups: dict[Spec, Communicator | None] = dict.fromkeys((*filter(None, lists), ranks))
    if rank in ranks:
        groups[ranks] = parent.split(min(ranks), ranks.index(rank))
    else:
        parent.split(size)  # no list has this color; the ranks in lists wait for all of `parent`
    return groups


def _on_same_machine(parent: Communicator) -> Communicator:
    if parent.size == 1:
        return parent
    machines = gather(this_machine(), parent)
    first = machines.index(machines[parent.rank])
    return parent if len(set(machines)) == 1 else parent.split(first, parent.rank)
