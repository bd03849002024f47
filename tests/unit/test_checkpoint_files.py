"""Checkpoint files that are not what they should be: one clear error, nothing executed."""

import io
import os
import pickle
import random
import shutil
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn.checkpoint import CheckpointError, convert, files
from tests.helpers import require

require.need("torch")
pytest.importorskip("safetensors")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

BEFORE = b"what was there before"


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    state = {f"bn/{key}": rng.normal(size=4).astype("f4") for key in ("gamma", "beta", "avg_mean")}
    state |= {"bn/avg_var": np.ones(4, "f4"), "bn/N": np.asarray(0)}
    return state | {"fc/W": rng.normal(size=(8, 4)).astype("f4"), "fc/b": np.zeros(8, "f4")}


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    return nn.ModuleDict({"bn": nn.BatchNorm1d(4), "fc": nn.Linear(4, 8)}).state_dict()


def make(path: Path, state: dict[str, Any] | None = None) -> Path:
    if path.suffix == ".npz":
        np.savez_compressed(path, **(state or arrays()))
    elif path.suffix == ".safetensors":
        save_file(state or tensors(), path)
    else:
        torch.save(state or tensors(), path)
    return path


def destination(source: Path) -> Path:
    path = source.with_name("dst.pt" if source.suffix == ".npz" else "dst.npz")
    path.write_bytes(BEFORE)
    return path


def refused(source: Path, message: str, **options: Any) -> None:
    target = destination(source)
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError, match=message) as error:
        convert(source, target, **options)
    assert str(error.value).startswith(f"{source}: ")
    assert target.read_bytes() == BEFORE
    assert sorted(source.parent.iterdir()) == before


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


def foreign(path: Path, rng: random.Random, marker: Path) -> None:
    path.write_bytes(rng.randbytes(rng.choice([0, 1, 7, 100, 5000])))


def other_format(path: Path, rng: random.Random, marker: Path) -> None:
    """The right name for another format, which zip archives of torch and NumPy make easy."""
    others = [suffix for suffix in (".npz", ".pt", ".safetensors") if suffix != path.suffix]
    make(path.with_name(f"other{rng.choice(others)}")).rename(path)


def pickled(path: Path, rng: random.Random, marker: Path) -> None:
    payload = Payload(marker)
    if path.suffix == ".npz":
        value = np.empty((), object) if rng.random() < 0.5 else np.empty(4, object)
        value[...] = payload
        np.savez(path, **(arrays() | {"bn/gamma": value}))
    elif rng.random() < 0.5:
        torch.save(tensors() | {"extra": payload}, path)
    else:
        path.write_bytes(pickle.dumps(payload, protocol=2))


def wrong_shape(path: Path, rng: random.Random, marker: Path) -> None:
    shape = rng.choice([(), (3,), (4, 1), (0,), (1,)])
    if path.suffix == ".npz":
        key = rng.choice(["bn/gamma", "bn/beta", "bn/avg_mean", "bn/avg_var"])
        make(path, arrays() | {key: np.zeros(shape, "f4")})
    else:
        key = rng.choice(["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"])
        make(path, tensors() | {key: torch.zeros(shape)})


def unknown_key(path: Path, rng: random.Random, marker: Path) -> None:
    key = rng.choice(["x", "bn_x", "fc_V", "../../x", "x\n", "\N{SNOWMAN}"])
    make(path, arrays() | {key: np.zeros(4)} if path.suffix == ".npz" else tensors() | {key: _ONE})


def zip_of_something(path: Path, rng: random.Random, marker: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in rng.choice([[], ["a.txt"], ["a.npy"], ["data.pkl"], ["archive/data.pkl"]]):
            archive.writestr(name, rng.randbytes(50))


def absurd_header(path: Path, rng: random.Random, marker: Path) -> None:
    if path.suffix == ".npz":
        shape = rng.choice(["(10**12,)", "(1000000000000,)", "(-4,)", "(4, -1)", "(True,)", "(5,)"])
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
        npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("bn/gamma.npy", npy)
    elif path.suffix == ".safetensors":
        size = rng.choice([2**63, 2**40, 10**8])
        path.write_bytes(size.to_bytes(8, "little") + b"{" + bytes(100))
    else:  # a view of one number, terabytes long
        make(path, {"fc.weight": torch.zeros(1).expand(10 ** rng.choice([10, 12, 15]))})


def symlink(path: Path, rng: random.Random, marker: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["nowhere", path.name, str(path.parent), "/dev/zero"]))


_ONE = torch.zeros(4)
MUTATIONS = [
    truncate, flip_bits, overwrite, foreign, other_format, pickled, wrong_shape, unknown_key,
    zip_of_something, absurd_header, symlink,
]  # fmt: skip
MAY_BE_HARMLESS = {flip_bits, overwrite}  # a date in a zip archive, or padding
SUFFIXES = [".npz", ".pt", ".safetensors"]
NUM_EACH = 10  # x 11 mutations x 3 formats


def outcome(source: Path, target: Path) -> tuple[dict[str, Any], str]:
    """What was converted, or the message of the one error that there may be."""
    try:
        return convert(source, target).state, ""
    except CheckpointError as error:
        return {}, str(error)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutated_files(mutate: Mutation, suffix: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    sound = make(tmp_path / f"sound{suffix}")
    expected = convert(sound, tmp_path / f"expected{'.pt' if suffix == '.npz' else '.npz'}").state
    for seed in range(NUM_EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        source = Path(shutil.copy(sound, folder / f"src{suffix}"))
        mutate(source, random.Random(f"{mutate.__name__} {suffix} {seed}"), marker)
        target = destination(source)
        there = {path.name for path in folder.iterdir()}
        state, message = outcome(source, target)
        if message:
            assert message.startswith(f"{source}: ")
            assert message.endswith(".")
            assert len(message) < 600, message
            assert target.read_bytes() == BEFORE
        else:
            assert mutate in MAY_BE_HARMLESS
            if suffix == ".safetensors":  # has no checksum, for names as for values
                continue
            assert list(state) == list(expected)
            assert all(np.array_equal(state[key], expected[key]) for key in expected)
        assert {path.name for path in folder.iterdir()} == there
        assert not marker.exists()


def test_the_payload_is_one(tmp_path: Path) -> None:
    """What the test above rests on."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()
    pickled(tmp_path / "a.npz", random.Random(0), tmp_path / "again")
    with np.load(tmp_path / "a.npz", allow_pickle=True) as file:
        file["bn/gamma"]
    assert (tmp_path / "again").exists()


def test_uninitialised_parameters(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **(arrays() | {"fc/W": np.asarray(None)}))
    refused(tmp_path / "a.npz", "'fc/W' must be an array of numbers: it is a pickled object, .* ca")


def test_a_snapshot_of_a_trainer(tmp_path: Path) -> None:
    snapshot = {f"updater/model:main/{key}": value for key, value in arrays().items()}
    snapshot["updater/iterator:main/_order"] = np.asarray(None)
    snapshot["extensions/LogReport/_log"] = np.asarray("[]")
    np.savez(tmp_path / "a.npz", **snapshot)
    refused(tmp_path / "a.npz", r"snapshot of a trainer .* Pass prefix='updater/model:main'\.")
    refused(tmp_path / "a.npz", "must be an array of floating.*<U2.*prefix", prefix="extensions")
    refused(tmp_path / "a.npz", "'_order' must be|pickled object", prefix="updater/iterator:main")
    refused(tmp_path / "a.npz", r"no key is below `prefix` 'x': found 'extensions', ", prefix="x")
    for prefix in ("updater/model:main", "updater/model:main/"):
        state = convert(tmp_path / "a.npz", tmp_path / "a.pt", prefix=prefix).state
        assert "bn.running_mean" in state


def test_the_dict_of_a_training_script(tmp_path: Path) -> None:
    model = tensors()
    torch.save({"model": model, "optimizer": {"state": {0: model}}, "epoch": 3}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "'epoch' must be a tensor: got int. Select the model alone with `p")
    state = convert(tmp_path / "a.pt", tmp_path / "a.npz", prefix="model").state
    assert "bn/avg_mean" in state
    torch.save([model], tmp_path / "b.pt")
    refused(tmp_path / "b.pt", r"must hold a dict of tensors: got list\. Save `model.state_dict")


# torch 2.11 and 2.15 warn, in other words, of every sparse tensor that they load.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_that_are_not_dense(value: Any, tmp_path: Path) -> None:
    torch.save({"fc.weight": value}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", r"'fc\.weight' must be a dense tensor with values")


def test_complex_numbers(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(2, 2, dtype=torch.complex64)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "'fc.weight' must be an array of real numbers: got complex64")
    make(tmp_path / "a.npz", {"fc/W": np.zeros((2, 2), "c8")})
    refused(tmp_path / "a.npz", "'fc/W' must be an array of floating-point numbers .* complex64")


def test_executables(tmp_path: Path) -> None:
    pickled(tmp_path / "a.pt", random.Random(0), tmp_path / "marker")
    refused(
        tmp_path / "a.pt",
        "holds Python objects that are no tensors, or is damaged; nothing was executed",
    )


def test_checksums(tmp_path: Path) -> None:
    data = make(tmp_path / "a.pt").read_bytes()
    value = tensors()["fc.weight"].numpy().tobytes()
    assert data.count(value) == 1
    (tmp_path / "a.pt").write_bytes(data.replace(value, value[:-1] + bytes([value[-1] ^ 1])))
    refused(tmp_path / "a.pt", r"the checksum of '.*/data/\d' must fit its contents")


def test_an_archive_with_hidden_members(tmp_path: Path) -> None:
    """One bit makes the comment of the last member but one swallow the last."""
    path = make(tmp_path / "a.npz")
    data = bytearray(path.read_bytes())
    *_, entry, _ = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    data[entry + 32] ^= 64  # the comment's length
    path.write_bytes(data)
    refused(path, r"the archive must have 7 members: 6 are found\. Copy it again")


def test_archives_that_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ALWAYS_ALLOWED", 10_000)
    make(tmp_path / "a.npz", {"fc/W": np.zeros((1000, 1000))})
    refused(
        tmp_path / "a.npz",
        r"declares 8000128 bytes in a file of \d+, and must declare at most 100 times",
    )
    torch.save({"fc.weight": torch.zeros(1).expand(1000, 1000)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "declares 4000000 bytes")


def test_a_shape_that_the_data_do_not_have(tmp_path: Path) -> None:
    absurd_header(tmp_path / "a.npz", random.Random(0), tmp_path)
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(4, "f4"))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("fc/W.npy", buffer.getvalue()[:-4])
    refused(tmp_path / "a.npz", r"'fc/W' must hold 16 bytes for its shape \(4,\): got 12")


def test_a_name_that_is_there_twice(tmp_path: Path) -> None:
    make(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(match="Duplicate"):
        archive.writestr("fc/W.npy", b"")
    refused(tmp_path / "a.npz", r"arrays with distinct names: got 'fc/W\.npy' twice")


def test_paths(tmp_path: Path) -> None:
    source = make(tmp_path / "a.npz")
    link = tmp_path / "link.npz"
    link.symlink_to(source)
    hard = tmp_path / "hard.npz"
    os.link(source, hard)
    for src, dst, message in (
        ("none.npz", "a.pt", r"none\.npz: no such file"),
        ("", "a.pt", "the suffix must be one of"),
        ("a.npz", "b.txt", r"b\.txt: the suffix must be one of \.npz, \.pt, .*: got '\.txt'"),
        ("a.npz", "b", "got 'none'. Rename"),
        ("a.npz", "none/b.pt", r"must be a file in a folder that exists\. Make the folder first"),
        ("a.npz", "", "must be a file in a folder"),
        ("a.npz", "a.npz", "must be another file than"),
        ("a.npz", "link.npz", "must be another file than"),
        ("link.npz", "a.npz", "must be another file than"),
        ("a.npz", "hard.npz", "must be another file than"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / src, tmp_path / dst)
    assert (
        convert(link, tmp_path / "b.pt").state.keys()
        == convert(hard, tmp_path / "b.PT").state.keys()
    )
    os.mkfifo(tmp_path / "pipe.npz")
    refused(tmp_path / "pipe.npz", "not a regular file")


def test_what_is_written_has_the_modes_of_a_new_file(tmp_path: Path) -> None:
    source = make(tmp_path / "a.npz")
    new, old = tmp_path / "new.pt", tmp_path / "old.pt"
    old.write_bytes(BEFORE)
    plain = stat.S_IMODE(old.stat().st_mode)
    convert(source, new)
    assert stat.S_IMODE(new.stat().st_mode) == plain
    old.chmod(0o640)
    convert(source, old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.pt").write_bytes(BEFORE)
    (tmp_path / "latest.pt").symlink_to("real.pt")
    convert(make(tmp_path / "a.npz"), tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(tmp_path / "real.pt", weights_only=True)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_disk_that_is_full(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / ("a.npz" if suffix != ".npz" else "a.pt"))
    target = tmp_path / f"dst{suffix}"
    target.write_bytes(BEFORE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"dst\..*: cannot be written: No space left on dev"):
        convert(source, target)
    assert target.read_bytes() == BEFORE
    assert len(list(tmp_path.iterdir())) == 2


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: Any, **options: Any) -> None:
        raise MemoryError("no room")

    source = make(tmp_path / "a.npz")
    monkeypatch.setattr(np, "frombuffer", exhausted)
    refused(source, r"cannot be read as \.npz, it is damaged or another format: MemoryError: no r")


@pytest.mark.parametrize("one, other", [(".npz", ".npz"), (".pt", ".safetensors"), (".pt", ".pth")])
def test_within_a_framework(one: str, other: str, tmp_path: Path) -> None:
    """Nothing changes but the format, and names."""
    source, target = make(tmp_path / f"a{one}"), tmp_path / f"b{other}"
    assert convert(source, target).notes == ()
    expected = arrays() if one == ".npz" else tensors()
    again = files.read(target, "")
    assert again.keys() == expected.keys()
    assert all(np.array_equal(again[key], expected[key]) for key in expected)
    renamed = convert(source, target, names={"bn": "norm", "fc": None})
    assert all(key.startswith("norm") for key in renamed.state)
    assert len(renamed.notes) == 1
    with pytest.raises(ValueError, match=f"`avg_var_count` has no meaning from {one} to {other}"):
        convert(source, target, avg_var_count=(1, 2))
    with pytest.raises(
        ValueError, match=r"`num_batches_tracked` has no meaning from .*: it must be"
    ):
        convert(make(tmp_path / "a.pt"), tmp_path / "b.npz", num_batches_tracked=1)


def test_any_name_can_be_written(tmp_path: Path) -> None:
    """`file` and `args` are arguments of numpy.savez."""
    source, target = make(tmp_path / "a.npz"), tmp_path / "b.npz"
    convert(source, target, names={"fc/W": "file", "fc/b": "args"})
    assert {"file", "args"} < files.read(target, "").keys()


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    torch.save({"a.weight": weight, "b.weight": weight.T}, tmp_path / "a.pt")
    state = convert(tmp_path / "a.pt", tmp_path / "a.safetensors").state
    assert torch.equal(files.read(tmp_path / "a.safetensors", "")["b.weight"], weight.T)
    assert state.keys() == {"a.weight", "b.weight"}


def test_the_same_file_every_time(tmp_path: Path) -> None:
    source = make(tmp_path / "a.pt")
    convert(source, tmp_path / "a.npz")
    convert(source, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_byte_and_memory_order(tmp_path: Path) -> None:
    """NumPy writes both orders of each."""
    weight = np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3))
    make(tmp_path / "a.npz", {"fc/W": weight})
    convert(tmp_path / "a.npz", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["fc.weight"]
    assert np.array_equal(loaded.numpy(), weight)


def test_safetensors_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a.npz")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"`pip install safetensors`, or use a \.pt file"):
        convert(source, tmp_path / "a.safetensors")
    assert len(list(tmp_path.iterdir())) == 1


def test_torch_files_from_before_zip(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert "bn/avg_mean" in convert(tmp_path / "a.pt", tmp_path / "a.npz").state
