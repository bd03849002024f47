"""Find the ranks that train a model together, and check that their models are equal."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from multibn import wire
from multibn._arrays import to_host
from multibn._platform import launched_processes
from multibn._typing import Array
from multibn.communicators import Communicator, Group, SingleProcess, as_communicator
from multibn.communicators.channel import at, flush_checks
from multibn.communicators.communicator import gather, identity
from multibn.communicators.diagnostics import describe_ranks
from multibn.communicators.handshake import all_ranks_agree
from multibn.communicators.resolve import default_group

_MAX_LISTED = 8  # names, arrays or ranks in an error message

# Maps the name of each array or layer to its facts: shape and dtype, or options.
Described: TypeAlias = Mapping[str, Mapping[str, str]]


def common_group(groups: Mapping[str, Communicator], /, *, parameter: str) -> Communicator:
    """Return the group that trains a model; `groups` maps layer names to the layers' groups.

    If torch's default process group is initialized, and a layer uses it or there are no layers,
    return it; otherwise the group that all layers were given. A `Group` is replaced by its parent:
    ranks that share statistics in parts still train one model. Not collective. `parameter` is the
    name of the caller's argument, for error messages. Raises ValueError if layers were given
    different groups, or if no layer was given a group although a launcher started several
    processes.
    """
    layers: dict[object, tuple[str, Communicator]] = {}
    for name, group in groups.items():
        while isinstance(group, Group):
            group = group.parent
        layers.setdefault(identity(group), (name, group))
    default = as_communicator()
    # If a layer has a different process group of the same ranks, return the layer's group: other
    # ranks may be waiting in that layer.
    _, same_ranks = layers.pop(identity(default), ("", None))
    if default_group() is not None and (same_ranks is not None or not layers):
        return same_ranks or default
    if len(layers) > 1:
        found = "; ".join(f"{group!r} in {name or 'the layer'}" for name, group in layers.values())
        raise ValueError(
            f"`{parameter}` must say which ranks take part: got None, and the model's layers have "
            f"different groups: {found}. Pass the group of all ranks that train this model."
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
    parameters: Collection[str],
    statistics: Collection[str],
    options: Mapping[str, Mapping[str, object]] | None = None,
    ignore: Iterable[str] = (),
    copy_to_host: Callable[[Any], npt.NDArray[Any]] = to_host,
) -> None:
    """Raise RuntimeError on all ranks unless they hold the same arrays, bit for bit.

    Compares 128-bit digests of copies in host memory. Collective: three small allreduces for any
    number of equal arrays. If arrays differ, further allreduces describe the difference: one for
    each array that differs, of the size of the array.

    `arrays` maps names to arrays of any library and device, or to None for an array that has no
    value yet. `parameters` and `statistics` are the names of trained arrays and of batch norms'
    running statistics, from which the error infers the likely cause; all other arrays are buffers
    of other modules. `options` maps layer names to the layers' options. `ignore` is one pattern of
    names to leave out, `"*.running_*"` for example, or several. Raises TypeError if an array cannot
    be copied, and RuntimeError on the other ranks. First checks the pending messages of layers on
    GPUs, see `flush_checks`.
    """
    flush_checks()
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
            copies.append(np.zeros(0) if array is None else copy_to_host(array))
            if copies[-1].dtype.hasobject:
                raise TypeError("it holds Python objects")
            described[name] = _describe(array)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            refused = TypeError(
                f"`{name}`, a {type(array).__qualname__}, cannot be compared: "
                f"{str(error).rstrip('.')}. Leave it out: `ignore={name!r}`."
            )
    for name, each in sorted((options or {}).items()):
        described[name or "the layer"] = {k: str(v) for k, v in each.items()}
    digests = [_digest(a.tobytes()) for a in copies]
    rank = communicator.rank
    _, mark = all_ranks_agree(
        communicator, "check_sync", mark=wire.rank_bit(rank) if refused else 0.0
    )
    if refused is not None:
        raise refused
    if mark:
        raise RuntimeError(
            "check_sync failed: an array of the model cannot be compared on "
            f"{describe_ranks([mark], communicator.size)}. See the error there."
        )
    communicator = at(communicator, "check_sync")
    mine = [_digest(repr(facts).encode()) for facts in (described, digests)]
    structures, contents = zip(*gather(mine, communicator), strict=True)
    if len({*structures}) > 1:
        raise RuntimeError(
            f"the model must be the same on all {communicator.size} ranks. "
            f"{differences(described, communicator)}. Build it from the same configuration, and "
            "call it once on every rank if it initializes in its first call."
        )
    if len({*contents}) > 1:
        kinds = parameters, statistics
        raise RuntimeError(_describe_differences(names, copies, digests, communicator, kinds))


def _describe(array: Array | None) -> dict[str, str]:
    shape = "no value yet" if array is None else str(tuple(array.shape))
    return {"shape": shape} if array is None else {"shape": shape, "dtype": str(array.dtype)}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def differences(described: Described, communicator: Communicator) -> str:
    """Return text: how the facts of some ranks differ from the commonest ones. Collective."""
    by_rank = gather(described, communicator)
    common = _commonest(by_rank)
    lines = []
    for rank, own in enumerate(by_rank):
        findings = [f"has {each}" for each in _new_facts(by_rank[common], own)]
        findings += [f"lacks {each}" for each in _new_facts(own, by_rank[common])]
        if findings:
            lines.append(f"rank {rank} {_shortened(findings)}")
    return f"Compared with rank {common}, {_shortened(lines, '; ')}"


def _commonest(answers: Sequence[object]) -> int:
    """Return the first rank that has the commonest answer."""
    texts = [repr(answer) for answer in answers]
    return texts.index(Counter(texts).most_common(1)[0][0])


def _new_facts(known: Described, facts: Described) -> Iterator[str]:
    """Yield the entries of `facts` that are missing from, or different in, `known`."""
    for name, each in facts.items():
        new = [f"{k}={v}" for k, v in each.items() if known.get(name, {}).get(k) != v]
        if new:
            yield f"{name} with {', '.join(new)}"


def _describe_differences(
    names: Sequence[str],
    copies: Sequence[npt.NDArray[Any]],
    digests: Sequence[str],
    communicator: Communicator,
    kinds: tuple[Collection[str], Collection[str]],
) -> str:
    """Return an error message: which arrays differ, where and by how much. Collective."""
    by_rank = gather(digests, communicator)
    common = _commonest(by_rank)
    differing = [i for i, texts in enumerate(zip(*by_rank, strict=True)) if len({*texts}) > 1]
    current = gather([_digest(copies[i].tobytes()) for i in differing], communicator)
    if all(each == current[0] for each in current):
        return (
            f"{len(differing)} of {len(names)} arrays changed during the comparison, and are now "
            f"the same on all ranks: {_shortened([names[i] for i in differing])}. The ranks "
            "share the model's memory, for example because torch.multiprocessing.spawn received "
            "one model: build or copy (copy.deepcopy) the model in each process."
        )
    distances = gather(
        [_distance(copies[i], communicator, common) for i in differing], communicator
    )
    lines = []
    for number, i in enumerate(differing):
        ranks = [rank for rank, texts in enumerate(by_rank) if texts[i] != by_rank[common][i]]
        largest = [f"{distances[rank][number]:.3g} on rank {rank}" for rank in ranks]
        is_known = any(distances[rank][number] for rank in ranks)
        how = f"by up to {_shortened(largest)}" if is_known else f"on rank(s) {ranks}"
        lines.append(f"{names[i]} {how}")
    return (
        f"{len(differing)} of {len(names)} arrays are not the same on all {communicator.size} "
        f"ranks. They differ from rank {common}'s: {_shortened(lines, '; ')}. "
        f"{_cause({names[i] for i in differing}, names, *kinds)}Broadcast them from one rank, or "
        "pass names that may differ in `ignore`."
    )


def _cause(
    differing: set[str],
    names: Sequence[str],
    parameters: Collection[str],
    statistics: Collection[str],
) -> str:
    """Return the likely cause, inferred from the kinds of arrays that differ; "" if unknown."""
    differing_statistics = differing.intersection(statistics)
    if differing.intersection(parameters):
        if differing_statistics or not {*names}.intersection(statistics):
            return ""
        return (
            "Running statistics agree: gradients are not averaged (DistributedDataParallel, "
            "average_gradients, or ChainerMN's multi-node optimizer does that), or the models "
            "were initialized differently. "
        )
    if differing_statistics:
        return (
            "Parameters agree, running statistics differ: their layers are not synchronized, or "
            "only within groups (convert_sync_batchnorm, create_mnbn_model and sync_running_stats "
            "change that), or the framework's batch norm function updates them (call "
            "sync_batch_norm with `running_mean` and `running_var`). "
        )
    return (
        "Parameters and running statistics agree: each rank updates the other buffers from its own "
        "data (codebooks, quantization observers and other libraries' norms do this). "
    )


def _distance(mine: npt.NDArray[Any], communicator: Communicator, root: int) -> float:
    """Return the largest absolute difference from the array of rank `root`.

    0 if float64 cannot show it (text, records, huge integers, -0.0). Collective: one allreduce.
    """
    mine = mine.reshape(-1) if mine.dtype.kind in "biufcmM" else np.zeros(0)
    wide = (mine.view(mine.real.dtype) if np.iscomplexobj(mine) else mine).astype(np.float64)
    of_root = communicator.allreduce(wide if communicator.rank == root else np.zeros_like(wide))
    with np.errstate(invalid="ignore"):  # inf - inf
        return float(np.abs(wide - of_root).max(initial=0))


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:_MAX_LISTED]) + " and more" * (len(items) > _MAX_LISTED)
