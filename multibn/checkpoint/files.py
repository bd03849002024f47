"""Files of arrays, read by numpy, torch and safetensors: nothing is executed, writing is atomic."""

import errno
import io
import os
import secrets
import shutil
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from multibn._platform import importable
from multibn._typing import Array
from multibn.checkpoint import flax_variables
from multibn.checkpoint.flax_variables import BATCH_STATS, PARAMS

# The framework that reads a file, by its suffix.
FRAMEWORKS = {
    ".npz": "chainer",
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "torch",  # or flax, on request
    ".msgpack": "flax",
}

# Names that mean something else to the library that writes a file.
_RESERVED = {".npz": {"file", "allow_pickle"}, ".safetensors": {"__metadata__"}}

_HDF5 = (
    "HDF5 is not supported: load the file with chainer.serializers.load_hdf5, and save it with "
    "save_npz."
)

# Arrays of zeros compress a thousandfold, so a small file may hold much more than its size. A file
# that declares more than these limits is refused: it may be an attack that fills the memory.
_ALWAYS_ALLOWED = 2**30
_MAX_EXPANSION = 100


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
    """Return `"chainer"`, `"torch"` or `"flax"` by the suffix; .safetensors serve the last two."""
    suffix = path.suffix.lower()
    if asked is not None:
        kinds = {"torch", "flax"} if suffix == ".safetensors" else {FRAMEWORKS.get(suffix)}
        if asked not in kinds:
            raise CheckpointError(
                f"{path}: the framework of a {suffix or 'file without a suffix'} must be one of "
                f"{', '.join(sorted(map(str, kinds)))}: got {asked!r}."
            )
        return asked
    if suffix not in FRAMEWORKS:
        advice = (
            "The suffix says the format: rename the file. A snapshot of Chainer's trainer needs "
            f"{path.name}.npz, and then `prefix` 'updater/model:main' (--prefix "
            "updater/model:main), which selects the model."
        )
        raise CheckpointError(
            f"{path}: the suffix must be one of {', '.join(FRAMEWORKS)}: got {suffix or 'none'!r}. "
            f"{_HDF5 if suffix in ('.h5', '.hdf5') else advice}"
        )
    return FRAMEWORKS[suffix]


def read(path: Path, prefix: str, asked: str | None = None) -> dict[str, Any]:
    """The arrays (npz) or tensors of a file whose keys start with `prefix`, without `prefix`."""
    readers = {"chainer": _read_npz, "torch": _read_torch, "flax": _read_flax}
    reader = readers[framework(path, asked)]
    if not os.path.isfile(path):
        kind = "no such file"
        if os.path.exists(path):
            kind = "a folder" if os.path.isdir(path) else "not a regular file (a pipe, for example)"
        raise CheckpointError(f"{path}: {kind}. Pass the path of a checkpoint file.")
    try:
        with path.open("rb") as file:
            if file.read(4) == b"\x89HDF":
                raise CheckpointError(_HDF5)
        return reader(path, prefix)
    except ImportError:  # torch or safetensors is not installed
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # parsers raise any exception for invalid bytes
        raise CheckpointError(
            f"{path}: cannot be read as {path.suffix} ({error!r:.200}), and nothing was executed: "
            "it is damaged, in another format, or contains Python objects other than arrays. Copy "
            "it again from where it was saved, select the model alone with `prefix`, or save "
            "`model.state_dict()` again. Chainer pickles uninitialized parameters: call the model "
            "once on data before saving."
        ) from error


def write(path: Path, state: Mapping[str, Any], asked: str | None = None) -> None:
    """Replace `path`, or the target of the link `path`, by a new file when this is complete."""
    if asked == "flax" and path.suffix.lower() == ".safetensors":
        state = flax_variables.with_collections(state)
    if taken := sorted(_RESERVED.get(path.suffix.lower(), set()) & state.keys()):
        raise CheckpointError(
            f"{path}: {taken[0]!r} is a reserved name in {path.suffix} files. Rename this array by "
            "`names`."
        )
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder: make it first", str(real.parent))
    content = _written(state, path.suffix.lower())
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if real.exists():
            shutil.copymode(real, temporary)
        os.replace(temporary, real)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def array_of(values: Mapping[str, Any], key: str) -> Any:
    """The array or tensor of real numbers under a key; raises for anything else."""
    value = values[key]
    dtype = getattr(value, "dtype", None)
    is_real = getattr(dtype, "kind", "f") in "fiub"  # torch's have no kind
    is_dense = str(getattr(value, "layout", "torch.strided")) == "torch.strided"
    is_there = not getattr(value, "is_meta", False)
    if not (is_real and is_dense and is_there) or getattr(dtype, "itemsize", 9) > 8:
        raise CheckpointError(
            f"{key!r:.99} must be a dense array or tensor of real numbers of at most 8 bytes: got "
            f"{dtype or type(value).__name__}. Select only the model with `prefix`; use the "
            "suffix .npz for NumPy's files and .pt for torch's."
        )
    return value


def to_numpy(values: Mapping[str, Any], key: str) -> Array:
    """`array_of` as a NumPy array; bfloat16, which NumPy does not have, becomes float32."""
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
    return array_of({key: array}, key)  # NumPy's dtypes say whether numbers are real


def _check_alone(models: set[str]) -> None:
    """Raise if `models`, which are below these prefixes, are a part of what a file holds."""
    if models:
        raise CheckpointError(
            f"holds more than a model: pass `prefix`, {' or '.join(map(repr, sorted(models)))} "
            f"(--prefix {min(models)})."
        )


def _select(
    values: Mapping[str, Any], prefix: str, separator: str, asked: str = ""
) -> dict[str, Any]:
    """Select the keys below `prefix`, and strip it; `asked` is the full prefix, for errors."""
    start = prefix.rstrip(separator) + separator if prefix else ""
    selected = {key[len(start) :]: array_of(values, key) for key in values if key.startswith(start)}
    if not selected:
        depth = start.count(separator)
        near = {separator.join(key.split(separator)[:depth]) for key in values}
        near = {key for key in near if key.startswith(prefix)}  # begun alike
        tops = near or {key.split(separator)[0] for key in values}
        found = ", ".join(f"{key!r:.99}" for key in sorted(tops)[:8]) or "no key"
        above = asked.removesuffix(prefix).rstrip(separator)
        top = f" in {above!r}" if above else " at the top"
        raise CheckpointError(
            f"no key starts with the prefix {asked or prefix!r}: found {found}{'' if near else top}"
            ". Pass another `prefix`, or none."
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
    """Raise unless all members of a zip archive are there, whole, and not too large."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = archive.infolist()
        _check_expansion(sum(member.file_size for member in members), path)
        # zipfile does not compare the number in the last record; a wrong length hides members.
        file.seek(-12 - len(archive.comment), os.SEEK_END)
        count = int.from_bytes(file.read(2), "little")
        # zipfile unpacks other methods in pieces of any size. Of a folder, which a flag makes of
        # any member, torch gives memory that nobody has written.
        is_sound = count in (len(members), 0xFFFF) and all(  # 0xFFFF: it has its own record
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
        paths = {"/".join(key.split("/")[:2]) for key in file}  # of the snapshot of a trainer
        _check_alone({key for key in paths if key.startswith("updater/model:") and not prefix})
        return _select(file, prefix, "/")


def _read_torch(path: Path, prefix: str) -> dict[str, Any]:
    sizes: dict[int, int] = {}
    if path.suffix.lower() == ".safetensors":
        # bfloat16, which NumPy does not have, needs torch.
        kind = "torch" if importable("torch") else "numpy"
        loaded: Any = import_module(f"safetensors.{kind}").load_file(path)
    else:
        loaded, sizes = _load_torch(path)
    # Training scripts save more than the model: dicts inside of dicts.
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
            f"must hold a dict of tensors by name: got {type(loaded).__name__}. Save "
            "`model.state_dict()`."
        )
    tensors = _select(loaded, prefix, ".", asked)
    for key, t in tensors.items() if sizes else ():
        is_plain = type(t).__name__ in ("Tensor", "Parameter") and not t.is_nested
        storage = t.untyped_storage() if is_plain else None
        if storage is None or storage.nbytes() != sizes.get(storage.data_ptr(), 0):
            raise CheckpointError(
                f"{key!r:.99} must be a tensor whose data is stored in the file: got "
                f"{type(t).__name__} of memory that the file does not write. Save "
                "`model.state_dict()` again."
            )
    # A tensor with strides of 0 may be much larger than its storage.
    _check_expansion(sum(t.nbytes for t in tensors.values()), path)
    return tensors


def _read_flax(path: Path, prefix: str) -> dict[str, Any]:
    is_msgpack = path.suffix.lower() == ".msgpack"
    tree = (
        flax_variables.read(path)
        if is_msgpack
        else import_module("safetensors.numpy").load_file(path)
    )
    flat = dict(flax_variables.leaves(tree)) if isinstance(tree, Mapping) else {}
    collections = {PARAMS, BATCH_STATS}
    tops = {key.split(".")[0] for key in flat}
    if not prefix and PARAMS in tops and (others := sorted(tops - collections)):
        raise CheckpointError(
            f"holds {', '.join(map(repr, others))} beside the model's variables: the state of an "
            "optimizer or of random numbers is not converted. Save the variables alone, "
            "{'params': ..., 'batch_stats': ...}."
        )
    state = _select(flat, prefix, ".")
    return {
        key.partition(".")[2] if key.split(".")[0] in collections else key: value
        for key, value in state.items()
    }


def _load_torch(path: Path) -> tuple[Any, dict[int, int]]:
    """What torch.load finds, and the sizes of the file's storages by their addresses.

    A malicious pickle can construct tensors on uninitialized memory.
    """
    import torch

    is_zip = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip files
    if is_zip:
        _check_archive(path)

    def load(byte: int) -> tuple[Any, list[Any]]:
        own: list[Any] = []

        def keep(storage: Any, _: str) -> Any:
            own.append(torch.tensor((), dtype=torch.uint8, device="cpu").set_(storage))
            if not is_zip:  # legacy format: the storages' data follows the pickle
                own[-1].fill_(byte)
            return storage

        return torch.load(path, map_location=keep, weights_only=True), own

    loaded, own = load(0)
    if not is_zip and not all(map(torch.equal, own, load(1)[1])):
        raise ValueError("a storage has no numbers")
    return loaded, {0: 0} | {one.data_ptr(): one.numel() for one in own}


def _written(state: Mapping[str, Any], suffix: str) -> bytes:
    """The content of a file."""
    import numpy as np

    buffer = io.BytesIO()
    if suffix == ".npz":
        np.savez_compressed(buffer, **state)
        return buffer.getvalue()
    if suffix == ".msgpack":
        return flax_variables.written(state)
    # NumPy arrays in this machine's byte order, and copies of tensors, which may share memory.
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
