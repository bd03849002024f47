"""The ranks that act on a model together, and whether their models are equal."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from multibn import wire
from multibn._arrays import to_host
from multibn._platform import launched_processes
from multibn._typing import Array
from multibn.communicators import Communicator, Group, SingleProcess, as_communicator
from multibn.communicators.communicator import gather, identity
from multibn.communicators.diagnostics import senders
from multibn.communicators.handshake import agree, look_at_unread
from multibn.communicators.resolve import default_group

_STATISTICS = "running_", "avg_"  # the beginnings of their names
_AT_MOST = 8  # names, arrays or ranks that an error message lists


def common_group(groups: Mapping[str, Communicator], /, *, parameter: str) -> Communicator:
    """Return the group that trains a model whose layers, by name, have these groups.

    The group that all layers were given; else torch's default process group, which has all ranks. A
    `Group` counts as its parent: ranks that share statistics in parts still train one model. Not
    collective. `parameter` is the name of the caller's argument, for messages. Raises ValueError if
    layers have unlike groups and there is no default process group, or if nothing names a group
    although a launcher started several processes.
    """
    layers: dict[object, tuple[str, Communicator]] = {}
    for name, group in groups.items():
        while isinstance(group, Group):
            group = group.parent
        layers.setdefault(identity(group), (name, group))
    default = as_communicator()
    takes_default = layers.pop(identity(default), None) is not None
    if default_group() is not None and (takes_default or not layers):
        return default
    if len(layers) > 1:
        found = "; ".join(f"{group!r} in {name or 'the layer'}" for name, group in layers.values())
        raise ValueError(
            f"`{parameter}` must say which ranks take part: got None, and the model's layers have "
            f"unlike groups: {found}. Pass the group of all ranks that train this model."
        )
    for _, group in layers.values():
        return group
    name, size = launched_processes()
    if size > 1:
        raise ValueError(
            f"`{parameter}` must say which ranks take part: got None, but the launcher started "
            f"{size} processes ({name}={size}), the model has no layer with a group, and "
            "torch.distributed is not initialised. Pass a communicator, mpi4py.MPI.COMM_WORLD for "
            "example, or call torch.distributed.init_process_group() before. To act on this "
            "process alone, pass multibn.SingleProcess()."
        )
    return SingleProcess()


def check_equal(
    arrays: Mapping[str, Array | None],
    communicator: Communicator,
    *,
    options: Mapping[str, Mapping[str, object]] | None = None,
    ignore: Iterable[str] = (),
    copied: Callable[[Any], npt.NDArray[Any]] = to_host,
) -> None:
    """Raise RuntimeError on all ranks unless they hold the same arrays, bit for bit.

    Compares 128-bit digests of copies in host memory. Collective: three small allreduces for any
    number of equal arrays. If arrays differ, more allreduces describe the difference, one for each
    array that differs, of its size.

    `arrays` maps names to arrays of any library and device, or to None for an array without a value
    yet. Names that match `ignore`, or a pattern of it, `"*.running_*"` for example, are left out.
    `options` are those of the model's layers, by the layers' names; `copied` makes the copies.
    Raises TypeError if an array cannot be copied, RuntimeError then on the other ranks. Looks at
    what layers have sent from GPUs before, see `look_at_unread`.
    """
    look_at_unread()
    is_one = isinstance(ignore, str) or not isinstance(ignore, Iterable)
    ignored: list[Any] = [ignore] if is_one else [*ignore]
    if not all(isinstance(pattern, str) for pattern in ignored):
        raise TypeError(f"`ignore` must be a pattern of names, or several: got {ignore!r}.")
    names = [name for name in sorted(arrays) if not any(fnmatchcase(name, p) for p in ignored)]
    described: dict[str, dict[str, str]] = {}
    copies: list[npt.NDArray[Any]] = []
    refused: TypeError | None = None
    for name in names:
        array: Any = arrays[name]
        try:
            copies.append(np.zeros(0) if array is None else copied(array))
            if copies[-1].dtype.hasobject:
                raise TypeError("it holds Python objects")
            described[name] = _described(array)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            refused = TypeError(
                f"`{name}`, a {type(array).__qualname__}, cannot be compared: "
                f"{str(error).rstrip('.')}. Leave it out: `ignore={name!r}`."
            )
    for name, each in sorted((options or {}).items()):
        described[name or "the layer"] = {k: str(v) for k, v in each.items()}
    digests = [_digest(a.tobytes()) for a in copies]
    rank = communicator.rank
    _, mark = agree(communicator, "check_sync", mark=wire.mark(rank) if refused else 0.0)
    if refused is not None:
        raise refused
    if mark:
        raise RuntimeError(
            f"rank {rank} cannot go on: an array of the model cannot be compared on "
            f"{senders([mark], communicator.size)}. The error raised there says why."
        )
    mine = [_digest(repr(facts).encode()) for facts in (described, digests)]
    built, held = zip(*gather(mine, communicator), strict=True)
    if len({*built}) > 1:
        raise RuntimeError(_how_built(described, communicator))
    if len({*held}) > 1:
        raise RuntimeError(_how_different(names, copies, digests, communicator))


def _described(array: Array | None) -> dict[str, str]:
    shape = "no value yet" if array is None else str(tuple(array.shape))
    return {"shape": shape} if array is None else {"shape": shape, "dtype": str(array.dtype)}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _how_built(described: Mapping[str, Mapping[str, str]], communicator: Communicator) -> str:
    """The arrays and options by which each rank differs from rank 0. Collective."""
    first, *others = gather(described, communicator)
    lines = []
    for rank, own in enumerate(others, start=1):
        findings = [f"has {each}" for each in _beyond(first, own)]
        findings += [f"lacks {each}" for each in _beyond(own, first)]
        if findings:
            lines.append(f"rank {rank} {_shortened(findings)}")
    return (
        f"the model must be built alike on all {communicator.size} ranks. Compared with rank 0, "
        f"{_shortened(lines, '; ')}. Build it from the same configuration, and call it once on "
        "every rank if it initialises in its first call."
    )


def _beyond(
    known: Mapping[str, Mapping[str, str]], facts: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """The names of facts that are not among the known ones, with what is not known of each."""
    for name, each in facts.items():
        new = [f"{k}={v}" for k, v in each.items() if known.get(name, {}).get(k) != v]
        if new:
            yield f"{name} with {', '.join(new)}"


def _how_different(
    names: Sequence[str],
    copies: Sequence[npt.NDArray[Any]],
    digests: Sequence[str],
    communicator: Communicator,
) -> str:
    """Which arrays differ from rank 0's, where, and by how much. Collective."""
    by_rank = gather(digests, communicator)
    differing = [i for i, texts in enumerate(zip(*by_rank, strict=True)) if len({*texts}) > 1]
    now = gather([_digest(copies[i].tobytes()) for i in differing], communicator)
    if all(each == now[0] for each in now):
        return (
            f"{len(differing)} of {len(names)} arrays have changed during the comparison, and are "
            f"now the same on all ranks: {_shortened([names[i] for i in differing])}. The ranks "
            "share the model's memory, as those of torch.multiprocessing.spawn do that were handed "
            "one model: build or copy (copy.deepcopy) the model in each process."
        )
    distances = gather([_distance(copies[i], communicator) for i in differing], communicator)
    lines = []
    for number, i in enumerate(differing):
        ranks = [rank for rank, texts in enumerate(by_rank) if texts[i] != by_rank[0][i]]
        far = [f"{distances[rank][number]:.3g} on rank {rank}" for rank in ranks]
        is_seen = any(distances[rank][number] for rank in ranks)
        how = f"by up to {_shortened(far)}" if is_seen else f"on rank(s) {ranks}"
        lines.append(f"{names[i]} {how}")
    statistics = {name for name in names if name.rpartition(".")[2].startswith(_STATISTICS)}
    cause = ""
    if statistics and statistics.isdisjoint(names[i] for i in differing):
        cause = (
            "Running statistics agree: gradients are not averaged (DistributedDataParallel, "
            "average_gradients, or ChainerMN's multi-node optimizer does that), or the models "
            "began with other numbers. "
        )
    elif statistics.issuperset(names[i] for i in differing):
        cause = (
            "Running statistics alone differ: these layers do not share theirs, or in groups "
            "(convert_sync_batchnorm, create_mnbn_model and sync_running_stats change that). "
        )
    return (
        f"{len(differing)} of {len(names)} arrays are not the same on all {communicator.size} "
        f"ranks. They differ from rank 0's: {_shortened(lines, '; ')}. {cause}Broadcast them "
        "from one rank, or leave out by `ignore` what is each rank's own."
    )


def _distance(mine: npt.NDArray[Any], communicator: Communicator) -> float:
    """The largest absolute difference from rank 0's. Collective: one allreduce of the size.

    0 where float64 shows none: of text and records, of huge integers, of 0 and -0.
    """
    mine = mine.reshape(-1) if mine.dtype.kind in "biufcmM" else np.zeros(0)
    wide = (mine.view(mine.real.dtype) if np.iscomplexobj(mine) else mine).astype(np.float64)
    first = communicator.allreduce(wide if communicator.rank == 0 else np.zeros_like(wide))
    with np.errstate(invalid="ignore"):  # inf - inf
        return float(np.abs(wide - first).max(initial=0))


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:_AT_MOST]) + " and more" * (len(items) > _AT_MOST)
