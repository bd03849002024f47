"""The ranks that act on a model together, and whether their models are equal."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from multibn._arrays import to_host
from multibn._typing import Array
from multibn.communicators import Communicator, DefaultCommunicator, Group, SingleProcess
from multibn.communicators.lookup import launched_processes
from multibn.communicators.objects import gather
from multibn.communicators.phase import look_at_unread
from multibn.message import all_equal

_LANES = 8  # 16-bit parts of a digest: sums of their squares are exact in float64
_AT_MOST = 8  # names, arrays or ranks that an error message lists


def largest_group(groups: Iterable[Communicator], /, *, parameter: str) -> Communicator:
    """The largest of `groups`, the communicators of a model's layers. Not collective.

    A `Group` counts as its parent: ranks that share statistics in parts still train one model.
    Raises ValueError if every one of `groups` is this process alone, although a launcher started
    several; `parameter` is the name of the caller's argument, for the message.
    """
    candidates = []
    for group in groups:
        while isinstance(group, Group):
            group = group.parent
        if isinstance(group, DefaultCommunicator):  # whose `size` may warn
            is_alone = group.default_group is None
        else:
            is_alone = isinstance(group, SingleProcess)
        if not is_alone:
            candidates.append(group)
    if candidates:
        return max(candidates, key=lambda c: c.size)
    name, size = launched_processes()
    if size > 1:
        raise ValueError(
            f"`{parameter}` must say which ranks take part: got None, but the launcher started "
            f"{size} processes ({name}={size}), the model has no layer that shares statistics with "
            "another, and torch.distributed is not initialised. Pass a communicator, "
            "mpi4py.MPI.COMM_WORLD for example, or call torch.distributed.init_process_group() "
            "before. To act on this process alone, pass multibn.SingleProcess()."
        )
    return SingleProcess()


def check_equal(
    arrays: Mapping[str, Array | None],
    communicator: Communicator,
    *,
    options: Mapping[str, Mapping[str, object]] | None = None,
    ignore: Iterable[str] = (),
) -> None:
    """Raise RuntimeError on all ranks unless they hold the same arrays, bit for bit.

    Compares 128-bit digests of copies in host memory. Collective: one allreduce of 32 numbers for
    any number of equal arrays. If arrays differ, more allreduces describe the difference, one for
    each array that differs, of its size.

    `arrays` maps names to arrays of any library and device, or to None for an array without a value
    yet. Names that match a pattern of `ignore`, `"*.running_*"` for example, are not compared.
    `options` are those of the model's layers, by the layers' names. Looks at what layers have sent
    from GPUs before, see `look_at_unread`.
    """
    look_at_unread()
    ignore = list(ignore)
    chosen = [
        (name, arrays[name])
        for name in sorted(arrays)
        if not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    described = [_described(name, a) for name, a in chosen]
    described += [
        f"{name or 'the layer'} with {_listed(each)}"
        for name, each in sorted((options or {}).items())
    ]
    copies = [np.zeros(0) if a is None else to_host(a) for _, a in chosen]
    digests = [_digest(a.tobytes()) for a in copies]
    alike_built, alike = _agree(
        [_digest("\n".join(described).encode()), _digest(b"".join(digests))], communicator
    )
    if not alike_built:
        raise RuntimeError(_how_built(described, communicator))
    if not alike:
        names = [name for name, _ in chosen]
        raise RuntimeError(_how_different(names, copies, digests, communicator))


def _described(name: str, array: Array | None) -> str:
    if array is None:
        return f"{name} (no value yet)"
    return f"{name} of shape {tuple(array.shape)} and dtype {array.dtype}"


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=2 * _LANES).digest()


def _agree(digests: Sequence[bytes], communicator: Communicator) -> npt.NDArray[np.bool_]:
    """For each of the digests, whether all ranks have the same. Collective: one allreduce."""
    v = np.frombuffer(b"".join(digests), dtype=np.uint16).astype(np.float64)
    sums = communicator.allreduce(np.stack([v, v**2]))
    equal = [all_equal(a, b, communicator.size) for a, b in zip(*sums, strict=True)]
    return np.all(np.reshape(equal, (-1, _LANES)), axis=1)


def _how_built(described: Sequence[str], communicator: Communicator) -> str:
    """Which arrays each rank has and rank 0 lacks, and the other way round. Collective."""
    first = gather(described, communicator)[0]
    extra = [f"has {line}" for line in described if line not in first]
    missing = [f"lacks {line}" for line in first if line not in described]
    lines = [
        f"rank {rank} {_shortened(findings)}"
        for rank, findings in enumerate(gather([*extra, *missing][: _AT_MOST + 1], communicator))
        if findings
    ]
    return (
        f"the model must be built alike on all {communicator.size} ranks. Compared with rank 0, "
        f"{_shortened(lines, '; ')}. Build it from the same configuration, and call it once on "
        "every rank if it initialises in its first call."
    )


def _how_different(
    names: Sequence[str],
    copies: Sequence[npt.NDArray[Any]],
    digests: Sequence[bytes],
    communicator: Communicator,
) -> str:
    """Which arrays differ from rank 0's, where, and by how much. Collective."""
    by_rank = gather([digest.hex() for digest in digests], communicator)
    differing = [i for i, texts in enumerate(zip(*by_rank, strict=True)) if len({*texts}) > 1]
    distances = gather([_distance(copies[i], communicator) for i in differing], communicator)
    lines = []
    for number, i in enumerate(differing):
        far = [
            f"{distances[rank][number]:.3g} on rank {rank}"
            for rank, texts in enumerate(by_rank)
            if texts[i] != by_rank[0][i]
        ]
        lines.append(f"{names[i]} by up to {_shortened(far)}")
    return (
        f"{len(differing)} of {len(names)} arrays are not the same on all {communicator.size} "
        f"ranks. They differ from rank 0's: {_shortened(lines, '; ')}. Broadcast them from one "
        "rank, or leave out by `ignore` what is each rank's own."
    )


def _distance(mine: npt.NDArray[Any], communicator: Communicator) -> float:
    """The largest absolute difference from rank 0's. Collective: one allreduce of the size."""
    mine = mine.reshape(-1)
    wide = (mine.view(mine.real.dtype) if np.iscomplexobj(mine) else mine).astype(np.float64)
    first = communicator.allreduce(wide if communicator.rank == 0 else np.zeros_like(wide))
    with np.errstate(invalid="ignore"):  # inf - inf
        return float(np.abs(wide - first).max(initial=0))


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:_AT_MOST]) + " and more" * (len(items) > _AT_MOST)
