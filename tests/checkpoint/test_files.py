"""Checkpoint files that are not what they should be: one clear error, nothing executed."""

import io
import os
import re
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn import cli
from multibn.checkpoint import CheckpointError, convert, files

pytest.importorskip("safetensors")

import torch
from safetensors.torch import save_file
from torch import nn

NEEDS = "torch"

BEFORE = b"what was there before"
DAMAGED = (
    r"cannot be read as \.(npz|pt) \(BadZipFile\('the archive has hidden, damaged or unsupported m"
    r"embers'\)\), and nothing was executed: the file is damaged, .*\. Copy the file again"
)


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


def edit(path: Path, at: int, change: Callable[[int], int]) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] = change(data[at])
    path.write_bytes(data)


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


def _cut(path: Path) -> None:
    """An array whose last element is missing."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(4, "f4"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fc/W.npy", buffer.getvalue()[:-4])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: np.savez(path, **(arrays() | {"fc/W": np.asarray(None)})),
         r"Python objects other than arrays\. .* Chainer pickles unin"),
        (lambda path: np.savez(path, W=np.ones(2, np.longdouble)),
         "'W' must be a dense array .* of at most 8 bytes: got float128"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"),
         "a.npz: cannot be read as .npz .*: the file is damaged, in another format, or contains"),
        (lambda path: make(path.with_suffix(".pt")).rename(path),
         r"must be a dense array or tensor of real .*: got bytes\. .* and \.pt for files of torch"),
        (_cut, r"ValueError\('EOF: reading array data, expected 16 bytes got 12"),
    ],
    ids=["uninitialised", "longdouble", "HDF5", "torch", "cut"],
)  # fmt: skip
def test_a_file_unlike_its_name_is_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    spoil(tmp_path / "a.npz")
    refused(tmp_path / "a.npz", message)


def test_a_snapshot_of_a_trainer_needs_a_prefix(tmp_path: Path) -> None:
    snapshot = {f"updater/model:main/{key}": value for key, value in arrays().items()}
    snapshot["updater/iterator:main/_order"] = np.asarray(None)
    snapshot["extensions/LogReport/_log"] = np.asarray("[]")
    np.savez(tmp_path / "a.npz", **snapshot)
    message = r"contains more than a model: pass `prefix` '{0}' \(--prefix {0}\)\."
    refused(tmp_path / "a.npz", message.format("updater/model:main"))
    refused(tmp_path / "a.npz", "'LogReport/_log'|bytes: got <U2. Select", prefix="extensions")
    refused(tmp_path / "a.npz", "Python objects other", prefix="updater/iterator:main")
    refused(tmp_path / "a.npz", "starts with the prefix 'x': found 'extensions', ", prefix="x")
    for prefix in ("updater/model:main", "updater/model:main/"):
        state = convert(tmp_path / "a.npz", tmp_path / "a.pt", prefix=prefix).state
        assert "bn.running_mean" in state


def test_the_dict_of_a_training_script_needs_a_prefix(tmp_path: Path) -> None:
    model, path = tensors(), tmp_path / "a.pt"
    script = {"model": model, "optimizer": {"state": {0: model}}, "epoch": 3}
    nested = {"all": {"model": model}, "epoch": 3}
    for state, prefix, message in (
        (script, "", r"more than a model: pass `prefix` 'model' \(--prefix model\)\."),
        (script, "modle", "starts with the prefix 'modle': found 'epoch', 'model'"),
        (script, "optimizer.state", "a dict that maps str to tensors: got dict"),
        ({"ema": model, "model": model}, "", r"`prefix` 'ema' or 'model' \(--prefix ema\)"),
        ({"model": {"steps": 3}}, "", "'model' must be a dense array or .* real .*: got dict. Sel"),
        (
            {"all": {"model": {}}},
            "all.model",
            r"the prefix 'all\.model': found no key\. Correct or",
        ),
        (nested, "all.model.x", r"'all\.model\.x': found 'all\.model\.bn', 'all\.model\.[a-z]+'"),
        ([model], "", "must contain a dict that maps str to tensors: got list. Save `model.st"),
    ):
        torch.save(state, path)
        refused(path, message, prefix=prefix)
    torch.save(nested, path)
    for prefix, key in {"all.model": "bn/N", "all.model.": "bn/N", "all.model.fc": "W"}.items():
        assert key in convert(path, tmp_path / "a.npz", prefix=prefix).state


# torch 2.11 and 2.15 warn, in other words, of every sparse tensor that they load.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize(
    "value, message",
    [
        (torch.eye(2).to_sparse(), "a dense array or tensor of real numbers of at most 8 bytes"),
        (torch.zeros(2, device="meta"), "a dense array or tensor of real numbers of at most 8 b"),
        (torch.zeros(2, 2).to(torch.float8_e5m2),
         r"dense and .* dtype that NumPy supports: .* Conv"),
        (torch.zeros(2, dtype=torch.complex64), "a dense array or tensor of real .*: got comp"),
    ],
    ids=["sparse", "meta", "float8", "complex"],
)  # fmt: skip
def test_tensors_that_numpy_lacks_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    torch.save({"fc.weight": value}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", f"'fc.weight' must be {message}")
    if "at most" in message:
        with pytest.raises(CheckpointError, match=r"'fc\.weight' must be a dense array"):
            convert(tmp_path / "a.pt", tmp_path / "b.pth")


def test_wrong_checksums_and_hidden_members_are_refused(tmp_path: Path) -> None:
    """One bit makes the comment of the last member but one swallow the last."""
    path = make(tmp_path / "a.pt")
    edit(path, path.read_bytes().index(tensors()["fc.weight"].numpy()), lambda byte: byte ^ 1)
    refused(path, DAMAGED)
    path = make(tmp_path / "a.npz")
    *_, entry, _ = [match.start() for match in re.finditer(b"PK\x01\x02", path.read_bytes())]
    edit(path, entry + 32, lambda byte: byte ^ 64)  # the comment's length
    refused(path, DAMAGED)


def test_archives_with_a_comment_or_with_counts_elsewhere_are_read(tmp_path: Path) -> None:
    path = make(tmp_path / "a.npz")
    for at in range(-14, -10):  # the counts, which another record then has
        edit(path, at, lambda _: 0xFF)
    assert files.read(path, "").keys() == arrays().keys()
    make(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"after 90 epochs"
    assert files.read(path, "").keys() == arrays().keys()


def test_a_member_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    """torch.load gives memory that nobody has written for it."""
    path = make(tmp_path / "a.pt")
    attributes = path.read_bytes().rindex(b"PK\x01\x02") + 38
    edit(path, attributes, lambda byte: byte | 0x21)  # of MS-DOS: read-only, and of a file
    assert files.read(path, "").keys() == tensors().keys()
    edit(path, attributes, lambda byte: byte | 0x10)
    refused(path, DAMAGED)


class Made:
    """Pickled, a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [torch.FloatTensor, torch.Tensor])
def test_unwritten_memory_is_refused(kind: Any, nested: bool, is_zip: bool, tmp_path: Path) -> None:
    made = Made(kind, 60)
    state = tensors() | {"fc.weight": Made(nn.Parameter, made) if nested else made}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    refused(tmp_path / "a.pt", r"'fc\.weight' must be a tensor whose data is stored in the file: g")


def test_a_storage_that_an_old_file_does_not_fill_is_refused(tmp_path: Path) -> None:
    """Its numbers come last, of the storages that a list names."""
    torch.save({"w": torch.ones(60)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: data.rindex(b"\x80\x02]")] + b"\x80\x02].")
    refused(tmp_path / "a.pt", r"ValueError\('a storage has no data'\)")


def test_archives_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "_ALWAYS_ALLOWED", 10_000)
    make(tmp_path / "a.npz", {"fc/W": np.zeros((1000, 1000))})
    message = r"decompresses to 8000128 bytes, more than 100 times its file size \(\d+\)"
    refused(tmp_path / "a.npz", message)
    torch.save({"fc.weight": torch.zeros(1).expand(1000, 1000)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "decompresses to 4000000 bytes")
    monkeypatch.setattr(files, "_ALWAYS_ALLOWED", 1)  # a hundred times the file's size may pass
    np.savez(tmp_path / "b.npz", W=np.ones((2, 2)))
    assert list(convert(tmp_path / "b.npz", tmp_path / "b.pt").state) == ["weight"]


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    """zipfile would unpack them in pieces of any size."""
    make(tmp_path / "b.npz")
    with (
        zipfile.ZipFile(tmp_path / "b.npz") as sound,
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive,
    ):
        for name in sound.namelist():
            archive.writestr(name, sound.read(name))
    refused(tmp_path / "a.npz", DAMAGED)


def test_paths_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "a.npz")
    link = tmp_path / "link.npz"
    link.symlink_to(source)
    (tmp_path / "folder.pt").mkdir()
    for src, dst, message in (
        ("none.npz", "a.pt", r"none\.npz: no such file"),
        ("x" * 999 + ".npz", "a.pt", "xx.npz: no such file"),
        ("a\0.npz", "a.pt", "no such file"),
        ("", "a.pt", "the suffix must be one of"),
        ("a.npz", "b.txt", r"b\.txt: the suffix must be one of \.npz, \.pt, .*: got '\.txt'"),
        ("a.npz", "b",
         r"got 'none'\. The suffix determines .*: rename the file\. .* b\.npz, and pass `p"),
        ("a.h5", "a.pt",
         r"got '\.h5'\. .* HDF5 is not supported: load the file with .*load_hdf5, and save"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / src, tmp_path / dst)
    before = sorted(tmp_path.iterdir())
    for dst in ("none/b.pt", "folder.pt", "x" * 999 + ".pt"):
        with pytest.raises(OSError, match=rf"\[Errno \d+\] .*: '{tmp_path}/"):
            convert(source, tmp_path / dst)
    with pytest.raises(OSError, match=rf"no such folder: create it first: '{tmp_path}/none'$"):
        convert(source, tmp_path / "none/b.pt")
    with pytest.raises(CheckpointError, match=r"starts with the prefix 'b': found 'bn', 'fc'"):
        convert(source, tmp_path / "b.pt", prefix="b")
    assert sorted(tmp_path.iterdir()) == before
    assert convert(link, link).state.keys() == convert(source, tmp_path / "b.NPZ").state.keys()
    os.mkfifo(tmp_path / "pipe.npz")
    refused(tmp_path / "pipe.npz", "not a regular file")


def test_what_is_written_has_the_modes_of_a_new_file_and_a_link_stays_one(tmp_path: Path) -> None:
    source = make(tmp_path / "a.npz")
    new, old = tmp_path / "new.pt", tmp_path / "old.pt"
    old.write_bytes(BEFORE)
    plain = stat.S_IMODE(old.stat().st_mode)
    convert(source, new)
    assert stat.S_IMODE(new.stat().st_mode) == plain
    old.chmod(0o640)
    convert(source, old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    (tmp_path / "latest.pt").symlink_to("old.pt")
    old.write_bytes(BEFORE)
    convert(source, tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(old, weights_only=True)


@pytest.mark.parametrize(
    "name, suffix", [("file", ".npz"), ("allow_pickle", ".npz"), ("__metadata__", ".safetensors")]
)
def test_reserved_names_are_refused(name: str, suffix: str, tmp_path: Path) -> None:
    """NumPy would leave the array out, or nobody could read the file."""
    path = tmp_path / f"model{suffix}"
    message = f"'{name}' is a reserved name in {suffix} files. Rename this array with `n"
    with pytest.raises(CheckpointError, match=message):
        files.write(path, {"w": np.ones(2), name: np.ones(3)})
    assert not path.exists()


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_full_disk_keeps_the_old_file(suffix: str, tmp_path: Path, monkeypatch: Any) -> None:
    source = make(tmp_path / ("a.npz" if suffix != ".npz" else "a.pt"))
    target = tmp_path / f"dst{suffix}"
    target.write_bytes(BEFORE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(source, target)
    assert target.read_bytes() == BEFORE
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("one, other", [(".npz", ".npz"), (".pt", ".safetensors"), (".pt", ".pth")])
def test_in_a_framework_only_format_and_names_change(one: str, other: str, tmp_path: Path) -> None:
    source, target = make(tmp_path / f"a{one}"), tmp_path / f"b{other}"
    assert convert(source, target).notes == ()
    expected = arrays() if one == ".npz" else tensors()
    again = files.read(target, "")
    assert again.keys() == expected.keys()
    assert all(np.array_equal(again[key], expected[key]) for key in expected)
    if one == ".pt":  # torch wrote so before 1.6
        torch.save(tensors(), source, _use_new_zipfile_serialization=False)
    renamed = convert(source, target, names={"bn": "norm", "fc": None})
    assert all(key.startswith("norm") for key in renamed.state)


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    torch.save({"a.weight": weight, "b.weight": weight.T}, tmp_path / "a.pt")
    state = convert(tmp_path / "a.pt", tmp_path / "a.safetensors").state
    assert torch.equal(files.read(tmp_path / "a.safetensors", "")["b.weight"], weight.T)
    assert state.keys() == {"a.weight", "b.weight"}


def test_either_byte_and_memory_order_is_read(tmp_path: Path) -> None:
    """NumPy writes both orders of each."""
    weight = np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3))
    make(tmp_path / "a.npz", {"fc/W": weight})
    convert(tmp_path / "a.npz", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["fc.weight"]
    assert np.array_equal(loaded.numpy(), weight)


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, arrays = make(tmp_path / "a.safetensors"), make(tmp_path / "a.npz")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for source, suffix in ((tensors, ".pt"), (arrays, ".safetensors")):
        target = tmp_path / f"dst{suffix}"
        assert cli.main(["convert", str(source), str(target)]) == 2
        assert "convert: import of safetensors.torch halted" in capsys.readouterr().err
        assert not target.exists()


def test_safetensors_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(tmp_path / "a.npz"), tmp_path / "a.safetensors"
    make(tmp_path / "b.npz", {"fc/W": np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3))})
    for name in ("torch", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    convert(source, target)
    convert(target, tmp_path / "c.npz")
    state, expected = files.read(tmp_path / "c.npz", ""), arrays()
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[key], expected[key]) for key in expected)
    convert(tmp_path / "b.npz", target)
    np.testing.assert_array_equal(files.read(target, "")["fc.weight"], [[0, 1, 2], [3, 4, 5]])
