"""Checkpoint files spoiled in many ways: bytes, headers, archives, pickles.

`make fuzz` spoils 2,000 of them; a file is refused with one message, or means what it did.
"""

import os
import pickle
import random
import resource
import shutil
import struct
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn.checkpoint import CheckpointError, convert

pytest.importorskip("safetensors")

import torch

from tests.checkpoint import test_files as plain

NEEDS = "torch"

MANY = "MULTIBN_FUZZ" in os.environ
FILES = int(os.environ.get("MULTIBN_FUZZ", "900")) // 5
SECONDS, BYTES = 10, 1.5 * 2**30  # what one file may cost: see _ALWAYS_ALLOWED

# Each takes the path of a sound file and spoils it; and gets a folder's name to make if executed.
Mutation = Callable[[Path, random.Random, Path], None]


def truncate(path: Path, rng: random.Random, marker: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def flip_bits(path: Path, rng: random.Random, marker: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 50])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(path: Path, rng: random.Random, marker: Path) -> None:
    """A page of zeros, as a disk leaves behind."""
    data = bytearray(path.read_bytes())
    start = 0 if path.suffix == ".safetensors" else rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    path.write_bytes(data)


def other_format(path: Path, rng: random.Random, marker: Path) -> None:
    """The right name for another format, which zip archives of torch and NumPy make easy."""
    others = [suffix for suffix in (".npz", ".pt", ".safetensors") if suffix != path.suffix]
    plain.make(path.with_name(f"other{rng.choice(others)}")).rename(path)


def pickled(path: Path, rng: random.Random, marker: Path) -> None:
    payload = plain.Made(os.mkdir, str(marker))
    if path.suffix == ".npz":
        value = np.empty((), object) if rng.random() < 0.5 else np.empty(4, object)
        value[...] = payload
        np.savez(path, **(plain.arrays() | {"bn/gamma": value}))
    elif rng.random() < 0.5:
        torch.save(plain.tensors() | {"extra": payload}, path)
    else:
        path.write_bytes(pickle.dumps(payload, protocol=2))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def rewrite(path: Path, contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite a file with checksums that fit."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def edit_bytes(data: bytes, rng: random.Random, stop: int | None = None) -> bytes:
    """Change, insert, remove or repeat a few bytes before `stop`."""
    edited = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(max(min(stop or len(edited), len(edited)), 1))
        some = rng.choice(
            [rng.randbytes(1), b"\xff" * 4, b"\x00" * 4, b"(", b"9" * 20, edited[at : at + 9]]
        )
        cut = rng.choice([0, 1, len(some)])
        edited[at : at + cut] = some
    return bytes(edited)


def zip_records(path: Path, rng: random.Random, marker: Path) -> None:
    """Numbers in the headers of members, and in the directory: sizes, offsets, methods, flags."""
    data = bytearray(path.read_bytes())
    starts = [
        i for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06")
        for i in range(len(data)) if data.startswith(mark, i)
    ]  # fmt: skip
    for _ in range(rng.choice([1, 2, 5])):
        at = rng.choice(starts) + rng.randrange(4, 46)
        value = rng.choice([0, 1, 8, 12, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)])
        size = rng.choice([1, 2, 4])
        data[at : at + size] = (value & (256**size - 1)).to_bytes(size, "little")
    path.write_bytes(data)


def zip_members(path: Path, rng: random.Random, marker: Path) -> None:
    """Members that are compressed, gone, renamed, swapped, or one more."""
    contents = members(path)
    names = list(contents)
    one, other = rng.choice(names), rng.choice(names)
    what = rng.randrange(6)
    if what == 0:
        del contents[one]
    elif what == 1:
        new = rng.choice(
            ["../../x.npy", "/x.npy", "a/b.npy", "\N{SNOWMAN}.npy", ".npy", "x" * 60000]
        )
        contents[new] = contents.pop(one)
    elif what == 2:
        contents[one], contents[other] = contents[other], contents[one]
    elif what == 3:
        contents["bn/extra.npy"] = contents[one]
    elif what == 4:
        contents[one] = edit_bytes(contents[one], rng)
    rewrite(
        path, contents, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    )


def headers(path: Path, rng: random.Random, marker: Path) -> None:
    """What describes the numbers: npy headers, the pickle of torch, the JSON of safetensors."""
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = edit_bytes(data[8 : 8 + size], rng)
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
        return
    contents = members(path)
    wanted = "data.pkl" if path.suffix == ".pt" else ".npy"
    name = rng.choice([name for name in contents if name.endswith(wanted)])
    stop = None if path.suffix == ".pt" else 128
    contents[name] = edit_bytes(contents[name], rng, stop)
    rewrite(path, contents)


def npy(header: str) -> bytes:
    data = header.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(data)) + data + bytes(16)


def absurd(path: Path, rng: random.Random, marker: Path) -> None:
    """Sizes that nobody has, and nesting without end, in the header of an array."""
    depth = rng.choice([50, 900, 5000, 100_000])
    shape = rng.choice(
        ["(" * depth + ")" * depth, "(1000000000000,)", "(-4,)", "(4, -1)", "(2**62,)",
         f"({10**30},)", "(4611686018427387904, 4)",
         "(0, 10**30)", f"({'1,' * depth})", "(1.5,)", "('4',)", "None", "__import__('os')"]
    )  # fmt: skip
    descr = rng.choice(["'<f4'", "'|O'", "[('a', '|O')]", "'<f4,|O'", "'V9999999999'", "5"])
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    rewrite(path, members(path) | {"bn/gamma.npy": npy(text)})


# Whether a changed file may pass: nothing may depend on the bytes that were changed, or they make
# other names and numbers, with checksums that fit.
NPZ, ZIPS, ALL = (".npz",), (".npz", ".pt"), (".npz", ".pt", ".safetensors")
MUTATIONS: dict[Mutation, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys((truncate, other_format, pickled), (ALL, "refused")),
    flip_bits: (ALL, "the same"),
    overwrite: (ALL, "the same"),
    zip_records: (ZIPS, "the same"),
    zip_members: (ZIPS, "others"),
    headers: (ALL, "others"),
    absurd: (NPZ, "others"),
}
PAIRS = [(mutate, suffix) for mutate, (suffixes, _) in MUTATIONS.items() for suffix in suffixes]


def outcome(source: Path, target: Path) -> tuple[dict[str, Any], str]:
    """What was converted, or the message of the one error that there may be."""
    try:
        return convert(source, target).state, ""
    except CheckpointError as error:
        return {}, str(error)


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_mutated_file_is_refused_or_sound(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    sound, meant = {}, {}
    for suffix in (".npz", ".pt", ".safetensors"):
        sound[suffix] = plain.make(tmp_path / f"sound{suffix}")
        target = plain.destination(sound[suffix])
        meant[suffix] = convert(sound[suffix], target).state
    start = 0 if not MANY else random.SystemRandom().randrange(2**32)
    counts: Counter[str] = Counter()
    for number in range(FILES):
        rng = random.Random(start + number)
        mutate, suffix = PAIRS[number % len(PAIRS)]
        which = f"{mutate.__name__} {suffix}, seed {start + number}"
        folder = tmp_path / "each"
        folder.mkdir()
        source = Path(shutil.copy(sound[suffix], folder / f"src{suffix}"))
        mutate(source, rng, marker)
        target = plain.destination(source)
        there = {path.name for path in folder.iterdir()}
        peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        state, message = outcome(source, target)
        if message:
            assert message.startswith(f"{source}: "), which
            assert message.endswith("."), (which, message)
            assert len(message) < 1000, (which, message)
            assert target.read_bytes() == plain.BEFORE, which
            counts["refused"] += 1
        else:
            same = list(state) == list(meant[suffix]) and all(
                np.array_equal(state[key], value) for key, value in meant[suffix].items()
            )
            may = MUTATIONS[mutate][1]
            assert may != "refused", which
            # safetensors has no checksum, for names as for values
            assert same or may == "others" or suffix == ".safetensors", which
            counts["the same" if same else "other names or numbers, that are sound"] += 1
        assert time.monotonic() - began < SECONDS, which
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
        assert grown < BYTES, (which, grown)
        assert {path.name for path in folder.iterdir()} == there, which
        assert not marker.exists(), which
        shutil.rmtree(folder)
    print(counts)
    assert counts["refused"] > FILES / 2


def test_the_payload_executes_when_it_is_unpickled(tmp_path: Path) -> None:
    """What the test above rests on."""
    pickle.loads(pickle.dumps(plain.Made(os.mkdir, str(tmp_path / "executed"))))
    assert (tmp_path / "executed").exists()
    pickled(tmp_path / "a.npz", random.Random(0), tmp_path / "again")
    with np.load(tmp_path / "a.npz", allow_pickle=True) as file:
        file["bn/gamma"]
    assert (tmp_path / "again").exists()


def test_a_file_that_executes_something_is_refused(tmp_path: Path) -> None:
    pickled(tmp_path / "a.pt", random.Random(0), tmp_path / "marker")
    plain.refused(tmp_path / "a.pt", "nothing was executed: .* Python objects other than arrays")


def test_dicts_that_are_repeated_are_refused(tmp_path: Path) -> None:
    """Two to the power of 60 entries, in a file of 2 kB, of which the prefix chooses one."""
    nested: dict[str, Any] = {"weight": torch.zeros(4)}
    for _ in range(60):
        nested = {"a": nested, "b": nested}
    message = "'a' must be a dense array or tensor of real .*: got dict"
    for prefix in ("", "b.a.b", "a.a.a"):
        if prefix == "a.a.a":
            nested["a"] = nested  # without an end
        torch.save(nested, tmp_path / "a.pt")
        plain.refused(tmp_path / "a.pt", message, prefix=prefix)


def test_a_size_that_is_declared_too_small_is_refused(tmp_path: Path) -> None:
    """500 MB of zeros in 500 kB, of which nothing beyond the declared size is unpacked."""
    path = tmp_path / "a.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("bn/gamma.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array(member, np.zeros(4, np.float32))
        for _ in range(500):
            member.write(bytes(2**20))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rfind(b"PK\x01\x02") + 24, 144)
    path.write_bytes(data)
    tracemalloc.start()
    plain.refused(path, plain.DAMAGED)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
