"""Comparison of arrays that should be equal on all ranks."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from multibn._arrays import to_host
from multibn._typing import Array
from multibn.communicators import Communicator
from multibn.communicators.objects import broadcast, gather
from multibn.message import all_equal

_LANES = 8  # 16-bit parts of a digest: sums of their squares are exact in float64
_AT_MOST = 8  # names, arrays or ranks that an error message lists


def check_equal(
    arrays: Mapping[str, Array | None], communicator: Communicator, *, ignore: Iterable[str] = ()
) -> None:
    """Raise RuntimeError on all ranks unless they hold the same arrays, bit for bit.

    Compares 128-bit digests of copies in host memory. Collective: one allreduce of 32 numbers for
    any number of equal arrays. If arrays differ, a few more allreduces describe the difference, one
    of them as large as each array that differs.

    `arrays` maps names to arrays of any library and device, or to None for an array without a value
    yet. Names that match a pattern of `ignore`, `"*.running_*"` for example, are not compared.
    """
    ignore = list(ignore)
    chosen = [
        (name, arrays[name])
        for name in sorted(arrays)
        if not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    described = [_described(name, a) for name, a in chosen]
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


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=2 * _LANES).digest()


def _agree(digests: Sequence[bytes], communicator: Communicator) -> npt.NDArray[np.bool_]:
    """Which of the digests are the same on all ranks. Collective: one allreduce."""
    v = np.frombuffer(b"".join(digests), dtype=np.uint16).astype(np.float64)
    sums = communicator.allreduce(np.stack([v, v**2]))
    equal = [all_equal(a, b, communicator.size) for a, b in zip(*sums, strict=True)]
    return np.all(np.reshape(equal, (-1, _LANES)), axis=1)


def _how_built(described: Sequence[str], communicator: Communicator) -> str:
    """Which arrays each rank has and rank 0 lacks, and the other way round. Collective."""
    first = broadcast(described, communicator, root=0)
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
    texts = [digest.hex() for digest in digests]
    firsts = broadcast(texts, communicator, root=0)
    differing = np.flatnonzero(~_agree(digests, communicator)).tolist()
    distances = {i: _distance_from_rank_0(copies[i], communicator) for i in differing}
    by_rank = gather(
        [d if texts[i] != firsts[i] else None for i, d in distances.items()], communicator
    )
    lines = []
    for i, on_ranks in zip(differing, zip(*by_rank, strict=True), strict=True):
        far = [f"{d:.3g} on rank {rank}" for rank, d in enumerate(on_ranks) if d is not None]
        lines.append(f"{names[i]} by up to {_shortened(far)}")
    return (
        f"{len(differing)} of {len(names)} arrays are not the same on all {communicator.size} "
        f"ranks. They differ from rank 0's: {_shortened(lines, '; ')}. Broadcast them from one "
        "rank, or leave out by `ignore` what is each rank's own."
    )


def _distance_from_rank_0(mine: npt.NDArray[Any], communicator: Communicator) -> float:
    """The largest absolute difference. Collective: one allreduce of the array's size."""
    mine = mine.reshape(-1)
    wide = (mine.view(mine.real.dtype) if np.iscomplexobj(mine) else mine).astype(np.float64)
    first = communicator.allreduce(wide if communicator.rank == 0 else np.zeros_like(wide))
    with np.errstate(invalid="ignore"):  # inf - inf
        return float(np.abs(wide - first).max(initial=0))


def _shortened(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:_AT_MOST]) + " and more" * (len(items) > _AT_MOST)
