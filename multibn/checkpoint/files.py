"""Files of arrays: reading executes nothing, and writing is atomic."""

import io
import math
import os
import pickle
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from multibn._environment import nearest
from multibn._typing import Array

# The framework that reads a file, by its suffix.
FRAMEWORKS = {".npz": "chainer", ".pt": "torch", ".pth": "torch", ".safetensors": "torch"}
SEPARATORS = {"chainer": "/", "torch": "."}

# Arrays of zeros compress a thousandfold, so a small file may hold much more than its size. A file
# that declares more than these limits is refused: it may be an attack that fills the memory.
_ALWAYS_ALLOWED = 2**30
_MAX_EXPANSION = 100

_PIECE = 2**20  # bytes

_MAX_NAME = 500  # characters; error messages repeat names

_END_OF_ZIP = 22  # bytes of the record that ends a zip archive, without the archive's comment


class CheckpointError(ValueError):
    """A checkpoint cannot be converted; the message names the file, the problem and a solution.

    Examples
    --------
    >>> from multibn.checkpoint import CheckpointError, convert
    >>> try:
    ...     convert("model.npz", "model.pt")
    ... except CheckpointError as error:
    ...     print(error)
    model.npz: no such file. Check the path.
    """


def framework(path: Path) -> str:
    """`"chainer"` or `"torch"`, by the suffix."""
    suffix = path.suffix.lower()
    if suffix not in FRAMEWORKS:
        raise CheckpointError(
            f"the suffix must be one of {', '.join(FRAMEWORKS)}: got {suffix or 'none'!r}. Rename "
            "the file: the suffix says which format it has."
        )
    return FRAMEWORKS[suffix]


def read(path: Path, prefix: str) -> dict[str, Any]:
    """The arrays (npz) or tensors of a file whose keys start with `prefix`, without `prefix`."""
    framework(path)
    if not path.exists():
        raise CheckpointError("no such file. Check the path.")
    if not path.is_file():
        raise CheckpointError("not a regular file. Name the checkpoint file itself.")
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            return _read_npz(path, prefix)
        values = _safetensors().load_file(path) if suffix == ".safetensors" else _read_pt(path)
        return _checked(values, prefix, path)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "holds Python objects that are no tensors, or is damaged; nothing was executed. Save "
            "`model.state_dict()` again where the file comes from."
        ) from error
    except Exception as error:  # parsers raise any exception for invalid bytes
        line = (str(error).splitlines() or [""])[0][:200].rstrip(".")
        reason = "".join(c if c.isprintable() else "?" for c in line)
        raise CheckpointError(
            f"cannot be read as {suffix}, it is damaged or another format: "
            f"{type(error).__name__}: {reason}. Copy it again from where it was saved."
        ) from error


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Replace `path`, or the target of the link `path`, by a new file when this is complete."""
    framework(path)
    path = Path(os.path.realpath(path))
    suffix = path.suffix.lower()
    try:
        with replacing(path) as temporary, temporary.open("xb") as file:
            if suffix == ".npz":
                _write_npz(file, state)
            elif suffix == ".safetensors":
                file.write(_safetensors().save(_tensors(state)))
            else:
                import torch

                torch.save(_tensors(state), file)
            file.flush()
            os.fsync(file.fileno())
    except CheckpointError:
        raise
    except Exception as error:  # torch raises RuntimeError for a full disk
        raise CheckpointError(
            f"cannot be written: {getattr(error, 'strerror', None) or error}. Choose another "
            "place, or make room."
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Path of a temporary file, which replaces `path` if the block ends without an exception."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _select(keys: Iterable[str], prefix: str, separator: str) -> dict[str, str]:
    """Map from key without `prefix` to key, for the keys below `prefix`."""
    keys = list(keys)
    longest = max(keys, key=len, default="")
    if len(longest) > _MAX_NAME:
        raise CheckpointError(
            f"names must have at most {_MAX_NAME} characters: got one of {len(longest)}, "
            f"{longest[:40]!r}... Copy the file again from where it was saved."
        )
    start = prefix.rstrip(separator) + separator if prefix else ""
    selected = {key[len(start) :]: key for key in keys if key.startswith(start)}
    if not selected:
        tops = sorted({key.partition(separator)[0] for key in keys})
        # "a/b/c" is below "a" and "a/b".
        parts = [key.split(separator) for key in keys]
        prefixes = {separator.join(p[:n]) for p in parts for n in range(1, len(p))}
        raise CheckpointError(
            f"no key is below `prefix` {prefix!r}{nearest(prefix, prefixes)}: found "
            f"{', '.join(map(repr, tops[:8])) or 'no'} at the top. Pass another `prefix`, or none."
        )
    return selected


def _check_expansion(size: int, path: Path) -> None:
    if size > max(_ALWAYS_ALLOWED, _MAX_EXPANSION * path.stat().st_size):
        raise CheckpointError(
            f"declares {size} bytes in a file of {path.stat().st_size}, and must declare at most "
            f"{_MAX_EXPANSION} times as many: it would fill the memory. Save the file "
            "uncompressed if you trust it."
        )


def _check_complete(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise if a damaged length hides members: zipfile does not check their number."""
    with path.open("rb") as file:
        file.seek(-_END_OF_ZIP - len(archive.comment), os.SEEK_END)
        count = int.from_bytes(file.read(_END_OF_ZIP)[10:12], "little")
    if count not in (len(archive.infolist()), 0xFFFF):  # 0xFFFF: the number has its own record
        raise CheckpointError(
            f"the archive must have {count} members: {len(archive.infolist())} are found. Copy it "
            "again from where it was saved."
        )


def _read_npz(path: Path, prefix: str) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        _check_complete(archive, path)
        members: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            key = info.filename.removesuffix(".npy")
            if key == info.filename or key in members:
                raise CheckpointError(
                    "an npz file must hold arrays with distinct names: got "
                    f"{info.filename[:_MAX_NAME]!r}{' twice' if key in members else ''}. Name a "
                    "torch file .pt."
                )
            members[key] = info
        models = sorted({k.split("/")[1] for k in members if k.startswith("updater/model:")})
        if models and not prefix:
            raise CheckpointError(
                f"is the snapshot of a trainer and holds {', '.join(models)} among other things. "
                f"Pass prefix='updater/{models[0]}'."
            )
        selected = _select(members, prefix, "/")
        _check_expansion(sum(members[old].file_size for old in selected.values()), path)
        return {
            new: _parse_npy(old, _read_member(archive, members[old]))
            for new, old in selected.items()
        }


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The contents up to the declared size, whose checksum must fit.

    In pieces: read at once, zipfile unpacks everything, however much, before it cuts to the size.
    """
    with archive.open(info) as file:
        return b"".join(iter(lambda: file.read(_PIECE), b""))


def _parse_npy(key: str, data: bytes) -> Array:
    import numpy as np
    from numpy.lib import format as npy

    file = io.BytesIO(data)
    version = npy.read_magic(file)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise CheckpointError(
            f"{key!r} must be an array of numbers: it is a pickled object, which is not loaded. "
            "Chainer pickles parameters that are not initialised: call the model once on data, and "
            "save it again."
        )
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise CheckpointError(
            f"{key!r} must be an array of floating-point numbers or integers up to 64 bits: got "
            f"{dtype}. Select the model alone with `prefix`."
        )
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size != len(data) - file.tell():
        raise CheckpointError(
            f"{key!r} must hold {size} bytes for its shape {str(shape)[:200]}: got "
            f"{len(data) - file.tell()}. Copy the file again from where it was saved."
        )
    array = np.frombuffer(data, dtype, offset=file.tell())
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="))


def _read_pt(path: Path) -> dict[str, Any]:
    import torch

    if zipfile.is_zipfile(path):  # torch before 1.6 wrote no zip files
        with zipfile.ZipFile(path) as archive:
            _check_complete(archive, path)
            _check_expansion(sum(info.file_size for info in archive.infolist()), path)
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(
                f"the checksum of {damaged!r} must fit its contents: it does not. Copy the file "
                "again from where it was saved."
            )
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"must hold a dict of tensors: got {type(loaded).__name__}. Save `model.state_dict()`."
        )
    return _flatten(loaded, path)


def _flatten(loaded: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """All entries of nested dicts under dotted keys: training scripts save more than the model."""
    # The limit stops dicts that hold the same dict twice, many levels deep: 2**levels entries.
    left = _MAX_EXPANSION * path.stat().st_size
    values = {}
    for key, value in _nested(loaded):
        left -= len(key) + 1
        if left < 0:
            raise CheckpointError(
                f"the names in it must be at most {_MAX_EXPANSION} times as long as the file: "
                "they are longer, since it repeats dicts inside of dicts. Save "
                "`model.state_dict()`."
            )
        if not isinstance(value, Mapping):
            values[key] = value
    return values


def _nested(loaded: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All entries, also those of nested dicts, with dotted keys."""
    for key, value in loaded.items():
        yield f"{path}{key}", value
        if isinstance(value, Mapping):
            yield from _nested(value, f"{path}{key}.")


def _checked(values: Mapping[str, Any], prefix: str, path: Path) -> dict[str, Any]:
    import torch

    tensors = {}
    for new, old in _select(values, prefix, ".").items():
        value = values[old]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{old!r} must be a tensor: got {type(value).__name__}. Select the model alone "
                "with `prefix`."
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            raise CheckpointError(
                f"{old!r} must be a dense tensor with values: it is sparse, quantized, nested or "
                "on the meta device. Save it as a dense one."
            )
        tensors[new] = value.detach().resolve_conj().resolve_neg()
    # A tensor with strides of 0 may be much larger than its storage.
    _check_expansion(sum(t.numel() * t.element_size() for t in tensors.values()), path)
    return tensors


def _write_npz(file: IO[bytes], state: Mapping[str, Any]) -> None:
    import numpy as np

    # numpy.savez would take keys such as "file" for its own arguments. A ZipInfo has a constant
    # date, so the same state always gives the same file.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, array in state.items():
            info = zipfile.ZipInfo(f"{key}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Contiguous copies that share no memory."""
    import numpy as np
    import torch

    return {
        key: value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.array(value, order="C"))
        for key, value in state.items()
    }


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "needs the library safetensors, which cannot be imported. Run "
            "`pip install safetensors`, or use a .pt file."
        ) from error
    return safetensors.torch
