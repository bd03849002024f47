"""Reading and writing checkpoint files: reading executes no code, and writing is atomic."""

import errno
import io
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from multibn._platform import importable
from multibn._typing import Array

# The framework of a file, by the file's suffix.
FRAMEWORKS = {
    ".npz": "chainer",
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "torch",  # by default; flax on request
    ".msgpack": "flax",
}

# The last parts of the names in flax's collection `batch_stats`; other arrays are in `params`.
FLAX_STATISTICS = "mean", "var"

# Names that the library that writes the file uses itself.
_RESERVED = {".npz": {"file", "allow_pickle"}, ".safetensors": {"__metadata__"}}

# Zeros compress a thousandfold, so a small file may fill the memory. A file whose content exceeds
# both limits is rejected as a possible decompression bomb.
_ALWAYS_ALLOWED = 2**30  # bytes
_MAX_EXPANSION = 100  # times the file size


class CheckpointError(ValueError):
    """A checkpoint cannot be converted; the message names the file, the problem and a solution.

    Examples
    --------
    >>> from multibn.checkpoint import CheckpointError, convert
    >>> try:
    ...     convert("model.npz", "model.pt")
    ... except CheckpointError as error:
    ...     print(error)
    model.npz: no such file. Pass the path of a checkpoint file.
    """


def framework(path: Path, asked: str | None = None) -> str:
    """Return "chainer", "torch" or "flax" from the suffix; `asked` decides for .safetensors."""
    suffix = path.suffix.lower()
    if suffix not in FRAMEWORKS:
        raise CheckpointError(
            f"{path}: the suffix must be one of {', '.join(FRAMEWORKS)}: got {suffix or 'none'!r}. "
            "The suffix determines the format: rename the file. Rename a snapshot of Chainer's "
            f"trainer to {path.name}.npz, and pass `prefix` 'updater/model:main' (--prefix "
            "updater/model:main) to select the model. HDF5 is not supported: load the file with "
            "chainer.serializers.load_hdf5, and save it with save_npz."
        )
    kinds = ("flax", "torch") if suffix == ".safetensors" else (FRAMEWORKS[suffix],)
    if asked not in (None, *kinds):
        raise CheckpointError(
            f"{path}: the framework of a {suffix} file must be {' or '.join(kinds)}: got {asked!r}."
        )
    return asked or FRAMEWORKS[suffix]


def read(path: Path, prefix: str, asked: str | None = None) -> dict[str, Any]:
    """Return the arrays or tensors whose keys start with `prefix`, which is stripped."""
    readers = {"chainer": _read_npz, "torch": _read_torch, "flax": _read_flax}
    reader = readers[framework(path, asked)]
    if not os.path.isfile(path):
        kind = "no such file"
        if os.path.exists(path):
            kind = "a folder" if os.path.isdir(path) else "not a regular file (a pipe, for example)"
        raise CheckpointError(f"{path}: {kind}. Pass the path of a checkpoint file.")
    try:
        return reader(path, prefix)
    except ImportError:  # torch or safetensors is not installed
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # parsers raise any exception for invalid bytes
        raise CheckpointError(
            f"{path}: cannot be read as {path.suffix} ({error!r:.200}), and nothing was executed: "
            "the file is damaged, in another format, or contains Python objects other than arrays. "
            "Copy the file again, select the model alone with `prefix`, or save "
            "`model.state_dict()` again. Chainer pickles uninitialized parameters: call the model "
            "once on data before saving."
        ) from error


def write(path: Path, state: Mapping[str, Any], asked: str | None = None) -> None:
    """Write a temporary file, then move this file to `path` (or to the target of a symlink)."""
    if framework(path, asked) == "flax":
        state = {
            f"{'batch_stats' if k.rpartition('.')[2] in FLAX_STATISTICS else 'params'}.{k}": value
            for k, value in state.items()
        }
    if taken := sorted(_RESERVED.get(path.suffix.lower(), set()) & state.keys()):
        raise CheckpointError(
            f"{path}: {taken[0]!r} is a reserved name in {path.suffix} files. Rename this array "
            "with `names`."
        )
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder: create it first", str(real.parent))
    content = _serialize(state, path.suffix.lower())
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if real.exists():
            shutil.copymode(real, temporary)
        os.replace(temporary, real)
    except OSError as error:  # its message names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def array_of(values: Mapping[str, Any], key: str) -> Any:
    """Return `values[key]`; raise unless this is a dense array or tensor of real numbers."""
    value = values[key]
    dtype = getattr(value, "dtype", None)
    is_real = getattr(dtype, "kind", "f") in "fiub"  # torch's dtypes have no kind
    is_dense = str(getattr(value, "layout", "torch.strided")) == "torch.strided"
    has_data = not getattr(value, "is_meta", False)
    if not (is_real and is_dense and has_data) or getattr(dtype, "itemsize", 9) > 8:
        raise CheckpointError(
            f"{key!r:.99} must be a dense array or tensor of real numbers of at most 8 bytes: got "
            f"{dtype or type(value).__name__}. Select only the model with `prefix`. The suffix "
            "must be .npz for files of NumPy and .pt for files of torch."
        )
    return value


def to_numpy(values: Mapping[str, Any], key: str) -> Array:
    """Return `values[key]` as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    import numpy as np

    value = array_of(values, key)
    try:
        if hasattr(value, "detach"):
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
            value = value.detach().cpu()
        array = np.asarray(value)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{key!r:.99} must be dense and have a dtype that NumPy supports: {error}. Convert it "
            "before saving."
        ) from error
    return array_of({key: array}, key)  # only NumPy's dtype shows whether the numbers are real


def format_keys(keys: Iterable[str]) -> str:
    """Quote the first six keys for an error message."""
    quoted = [f"{key!r:.99}" for key in keys]  # a key in a file may be very long
    more = f" and {len(quoted) - 6} more" if len(quoted) > 6 else ""
    return ", ".join(quoted[:6]) + more


def _check_alone(models: set[str]) -> None:
    """Raise if the file contains more than a model; `models` are the prefixes to choose from."""
    if models:
        raise CheckpointError(
            f"contains more than a model: pass `prefix` {' or '.join(map(repr, sorted(models)))} "
            f"(--prefix {min(models)})."
        )


def _select(
    values: Mapping[str, Any], prefix: str, separator: str, asked: str = ""
) -> dict[str, Any]:
    """Select the keys below `prefix`, and strip this prefix; errors name `asked`, the full one."""
    start = prefix.rstrip(separator) + separator if prefix else ""
    selected = {key[len(start) :]: array_of(values, key) for key in values if key.startswith(start)}
    if not selected:
        above, depth = asked.removesuffix(prefix), start.count(separator)
        names = {above + separator.join(key.split(separator)[:depth]) for key in values}
        raise CheckpointError(
            f"no key starts with the prefix {asked or prefix!r}: found "
            f"{format_keys(sorted(names)) or 'no key'}. Correct or omit `prefix`."
        )
    return selected


def _check_expansion(size: int, path: Path) -> None:
    if size > max(_ALWAYS_ALLOWED, _MAX_EXPANSION * path.stat().st_size):
        raise CheckpointError(
            f"decompresses to {size} bytes, more than {_MAX_EXPANSION} times its file size "
            f"({path.stat().st_size}), and may be a decompression bomb. If you trust the file, "
            "save it uncompressed."
        )


def _check_archive(path: Path) -> None:
    """Raise unless all members of a zip archive are visible, intact, and not too large."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = archive.infolist()
        _check_expansion(sum(member.file_size for member in members), path)
        # zipfile ignores the number of members in the last record; a wrong length hides members.
        file.seek(-12 - len(archive.comment), os.SEEK_END)
        count = int.from_bytes(file.read(2), "little")
        # zipfile unpacks other methods in pieces of any size. A flag can turn any member into a
        # folder, for which torch returns uninitialized memory.
        is_sound = count in (len(members), 0xFFFF) and all(  # 0xFFFF: zip64 has another record
            member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            and not (member.is_dir() or member.external_attr & 0x10)
            for member in members
        )
        if not is_sound or archive.testzip():
            raise zipfile.BadZipFile("the archive has hidden, damaged or unsupported members")


def _read_npz(path: Path, prefix: str) -> dict[str, Array]:
    import numpy as np

    _check_archive(path)
    with np.load(path, allow_pickle=False) as file:
        paths = {"/".join(key.split("/")[:2]) for key in file}  # updater/model:main
        _check_alone({key for key in paths if key.startswith("updater/model:") and not prefix})
        return _select(file, prefix, "/")


def _read_torch(path: Path, prefix: str) -> dict[str, Any]:
    sizes: dict[int, int] = {}
    if path.suffix.lower() == ".safetensors":
        # bfloat16, which NumPy lacks, needs torch.
        kind = "torch" if importable("torch") else "numpy"
        loaded: Any = import_module(f"safetensors.{kind}").load_file(path)
    else:
        loaded, sizes = _load_torch(path)
    # Training scripts save more than the model: a dict of dicts.
    if not prefix and isinstance(loaded, Mapping):
        parts = {key: part for key, part in loaded.items() if isinstance(part, Mapping)}
        _check_alone(
            {k for k, part in parts.items() if any(hasattr(v, "dtype") for v in part.values())}
        )
    asked = prefix
    name, _, rest = prefix.partition(".")
    while name and isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
        loaded = loaded[name]
        name, _, rest = (prefix := rest).partition(".")
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) for key in loaded):
        raise CheckpointError(
            "must contain a dict that maps str to tensors: got "
            f"{type(loaded).__name__}. Save `model.state_dict()`."
        )
    tensors = _select(loaded, prefix, ".", asked)
    for key, t in tensors.items() if sizes else ():
        is_plain = type(t).__name__ in ("Tensor", "Parameter") and not t.is_nested
        storage = t.untyped_storage() if is_plain else None
        if storage is None or storage.nbytes() != sizes.get(storage.data_ptr(), 0):
            raise CheckpointError(
                f"{key!r:.99} must be a tensor whose data is stored in the file: got "
                f"{type(t).__name__} whose memory the file does not initialize. Save "
                "`model.state_dict()` again."
            )
    # A tensor with strides of 0 may be much larger than its storage.
    _check_expansion(sum(t.nbytes for t in tensors.values()), path)
    return tensors


def _read_flax(path: Path, prefix: str) -> dict[str, Any]:
    if path.suffix.lower() == ".msgpack":
        from flax import serialization, traverse_util

        tree = serialization.msgpack_restore(path.read_bytes())
        flat = traverse_util.flatten_dict(tree, sep=".")
    else:
        flat = import_module("safetensors.numpy").load_file(path)
    collections = {"params", "batch_stats"}
    tops = {key.split(".")[0] for key in flat}
    if not prefix and "params" in tops and (others := sorted(tops - collections)):
        raise CheckpointError(
            f"contains {', '.join(map(repr, others))} in addition to the model's variables: the "
            "state of an optimizer or of random numbers is not converted. Save only the variables, "
            "{'params': ..., 'batch_stats': ...}."
        )
    return {
        key.partition(".")[2] if key.split(".")[0] in collections else key: value
        for key, value in _select(flat, prefix, ".").items()
    }


def _load_torch(path: Path) -> tuple[Any, dict[int, int]]:
    """Return what torch.load returns, and the sizes of the file's storages by address.

    A malicious pickle can construct tensors on uninitialized memory: their storages are not listed.
    """
    import torch

    is_zip = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip files
    if is_zip:
        _check_archive(path)

    def load(byte: int) -> tuple[Any, list[Any]]:
        storages: list[Any] = []

        def record(storage: Any, _: str) -> Any:
            storages.append(torch.tensor((), dtype=torch.uint8, device="cpu").set_(storage))
            if not is_zip:  # legacy format: the storages' data follows the pickle
                storages[-1].fill_(byte)
            return storage

        return torch.load(path, map_location=record, weights_only=True), storages

    loaded, storages = load(0)
    # A storage that keeps the fill byte is not in the file.
    if not is_zip and not all(map(torch.equal, storages, load(1)[1])):
        raise ValueError("a storage has no data")
    return loaded, {0: 0} | {storage.data_ptr(): storage.numel() for storage in storages}


def _serialize(state: Mapping[str, Any], suffix: str) -> bytes:
    """Return the bytes of a file with this suffix."""
    import numpy as np

    buffer = io.BytesIO()
    if suffix == ".npz":
        np.savez_compressed(buffer, **state)
        return buffer.getvalue()
    if suffix == ".msgpack":
        from flax import serialization, traverse_util

        tree = traverse_util.unflatten_dict(state, sep=".")
        return bytes(serialization.msgpack_serialize(tree))
    # torch and safetensors need native byte order, and safetensors tensors that share no memory.
    copies = {
        key: np.array(a, a.dtype.newbyteorder("="), order="C") if isinstance(a, np.ndarray)
        else a.detach().clone().contiguous()
        for key, a in state.items()
    }  # fmt: skip
    if suffix == ".safetensors" and not importable("torch"):
        return import_module("safetensors.numpy").save(copies)
    import torch

    tensors = {key: torch.as_tensor(a) for key, a in copies.items()}
    if suffix == ".safetensors":
        return import_module("safetensors.torch").save(tensors)
    torch.save(tensors, buffer)
    return buffer.getvalue()
