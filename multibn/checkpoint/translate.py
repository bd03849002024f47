"""Translates a model's state between Chainer's npz and torch's state_dict.

Translates names; values never change, unless the caller asks for another count for the running
variance. Notes say what a file does not contain. Nothing in a file is executed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multibn._typing import Array, check_int
from multibn.checkpoint import files, keys, norms
from multibn.checkpoint.files import SEPARATORS, CheckpointError
from multibn.checkpoint.keys import Converted, Names
from multibn.checkpoint.norms import CHAINER, TORCH, Counts

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and of torch.compile


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    names: Names | None = None,
    prefix: str = "",
    skip_unknown: bool = False,
    num_batches_tracked: int = 0,
    avg_var_count: Counts | None = None,
) -> Converted:
    """Convert the model in one checkpoint file to another file, of this or the other framework.

    The suffix gives the format: .npz is Chainer's; .pt, .pth (torch.save) and .safetensors are
    torch's. Between two files of one framework only the format changes, and names on request.

    `dst` is replaced when the new file is complete on disk, and unchanged after any error. Only
    tensors are unpickled (`weights_only=True`, `allow_pickle=False`).

    Parameters
    ----------
    src, dst
        Paths of different files. The folder of `dst` must exist.
    prefix
        Convert only the keys below this one: `"updater/model:main"` of the snapshot of a Chainer
        trainer, `"model"` or `"state_dict"` of the dict that a training script saves with torch.
    names, skip_unknown, num_batches_tracked, avg_var_count
        As `chainer_to_torch`. The keys in `names` are without `prefix`; `num_batches_tracked` can
        be set only from Chainer to torch.

    Returns
    -------
    Converted
        The arrays written, and the notes.

    Raises
    ------
    CheckpointError
        If a file cannot be read, converted or written: the message begins with its name.
    TypeError, ValueError
        If an option is not valid. `CheckpointError` is a ValueError, too.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from chainer import links, serializers
    >>> from multibn.checkpoint import convert
    >>> with TemporaryDirectory() as folder:
    ...     serializers.save_npz(f"{folder}/a.npz", links.Linear(3, 2))
    ...     converted = convert(f"{folder}/a.npz", f"{folder}/a.pt")
    ...     torch.nn.Linear(3, 2).load_state_dict(torch.load(f"{folder}/a.pt"))
    <All keys matched successfully>
    """
    source, target = Path(src), Path(dst)
    with _about(target):
        if target.is_dir() or not target.parent.is_dir():
            raise CheckpointError("must be a file in a folder that exists. Make the folder first.")
        if os.path.realpath(source) == os.path.realpath(target) or (
            source.exists() and target.exists() and source.samefile(target)
        ):
            raise CheckpointError(f"must be another file than {source}. Choose another name.")
        to = files.framework(target)
    with _about(source):
        state = files.read(source, prefix)
        came_from = files.framework(source)
        if avg_var_count is not None and came_from == to:
            raise _meaningless("avg_var_count", source, target)
        if num_batches_tracked and (came_from, to) != ("chainer", "torch"):
            raise _meaningless("num_batches_tracked", source, target)
        if came_from == to:
            notes: list[str] = []
            state = keys.leave_out(state, names, SEPARATORS[to], notes)
            converted = keys.rename(
                state, to, to, lambda leaves: {k: k for k in leaves}, names, False, notes
            )
        elif to == "torch":
            converted = chainer_to_torch(
                state,
                names=names,
                skip_unknown=skip_unknown,
                num_batches_tracked=num_batches_tracked,
                avg_var_count=avg_var_count,
            )
        else:
            converted = torch_to_chainer(
                state, names=names, skip_unknown=skip_unknown, avg_var_count=avg_var_count
            )
    with _about(target):
        files.write(target, converted.state)
    return converted


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Start the message of any CheckpointError with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__


def chainer_to_torch(
    arrays: Mapping[str, Array],
    /,
    *,
    names: Names | None = None,
    skip_unknown: bool = False,
    num_batches_tracked: int = 0,
    avg_var_count: Counts | None = None,
) -> Converted:
    """Translate the state of a Chainer model to torch's names.

    `predictor/bn/gamma` becomes `predictor.bn.weight`, and likewise beta and b bias, W weight,
    avg_mean running_mean, avg_var running_var. The layouts of Linear, EmbedID, convolutions and
    deconvolutions are the same in both frameworks.

    Parameters
    ----------
    arrays
        By their names in the npz file, `a/b/W`.
    names
        Other names of layers or single arrays: prefixes, `{"predictor": ""}`, or whole keys,
        `{"bn/gamma": "norm.weight"}`, from the source's names to the target's; None leaves the
        arrays out. The longest match counts.
    skip_unknown
        Leave out arrays without a counterpart in the other framework, with a note; else raise.
    num_batches_tracked
        The counter of every batch normalization layer. A file of Chainer does not have one.
    avg_var_count
        Rescale the running variance, unbiased by a number of elements per channel, to another
        number: the pair (number in the source, number wanted), where math.inf stands for the biased
        variance. Or a dict from names of layers in the source to pairs, because the number of a
        convolutional layer depends on the size of its input.

    Returns
    -------
    Converted
        NumPy arrays of unchanged dtypes by torch's names, `a.b.weight`.

    Raises
    ------
    CheckpointError
        If a key is unknown, a shape is not valid, two keys get one name, or an entry of `names`
        or `avg_var_count` matches no key.
    TypeError, ValueError
        If `num_batches_tracked` or a count is not valid.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import chainer_to_torch
    >>> list(chainer_to_torch({"bn/gamma": np.ones(8), "bn/beta": np.zeros(8)}).state)
    ['bn.weight', 'bn.bias']
    """
    check_int("num_batches_tracked", num_batches_tracked, least=0)

    def leaf_names(leaves: Mapping[str, Array]) -> dict[str, str]:
        known = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}
        return (
            known | dict(zip(CHAINER[1:], TORCH[1:], strict=True))
            if "avg_mean" in leaves
            else known
        )

    notes: list[str] = []
    arrays = _translate(arrays, CHAINER, TORCH, names, num_batches_tracked, avg_var_count, notes)
    return keys.rename(arrays, "chainer", "torch", leaf_names, names, skip_unknown, notes)


def torch_to_chainer(
    state: Mapping[str, Any],
    /,
    *,
    names: Names | None = None,
    skip_unknown: bool = False,
    avg_var_count: Counts | None = None,
) -> Converted:
    """Translate the state of a torch model to Chainer's names; the inverse of `chainer_to_torch`.

    Plain, synchronized and sub-batch layers: of a SubBatchNorm, the statistics of the whole
    population are carried over. A prefix of all keys from DistributedDataParallel or torch.compile
    is removed first. A one-dimensional weight with a bias, but without running statistics, becomes
    gamma of a normalization; without a bias it must be in `names`.

    Parameters
    ----------
    state
        Tensors, or arrays, by their names in the state_dict.
    names, skip_unknown, avg_var_count
        As `chainer_to_torch`, from torch's names to Chainer's.

    Returns
    -------
    Converted
        NumPy arrays by Chainer's names. Dtypes are unchanged, but bfloat16, which NumPy does not
        have, becomes float32.

    Raises
    ------
    CheckpointError, ValueError
        As `chainer_to_torch`.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import torch_to_chainer
    >>> list(torch_to_chainer({"bn.weight": np.ones(8), "bn.bias": np.zeros(8)}).state)
    ['bn/gamma', 'bn/beta']
    """
    notes: list[str] = []
    state = _without_splits(_unwrapped(state, notes), notes)
    arrays = _translate(state, TORCH, CHAINER, names, 0, avg_var_count, notes)
    scaled: list[Mapping[str, Array]] = []  # layers taken for normalizations

    def leaf_names(leaves: Mapping[str, Array]) -> dict[str, str]:
        if "running_mean" in leaves:
            return dict(zip(TORCH[1:], CHAINER[1:], strict=True))
        weight, bias = leaves.get("weight"), leaves.get("bias")
        like_bias = weight is not None and bias is not None and weight.shape == bias.shape
        if weight is None or (weight.ndim > 1 and not like_bias):
            return {"weight": "W", "bias": "b"}
        if weight.ndim == 1 and like_bias:
            scaled.append(leaves)
            return {"weight": "gamma", "bias": "beta"}
        return {"bias": "b"}  # the weight may be of PReLU, RMSNorm, LayerNorm over two axes...

    converted = keys.rename(arrays, "torch", "chainer", leaf_names, names, skip_unknown, notes)
    if scaled:
        note = (
            f"{len(scaled)} layer(s) have one-dimensional weights and no running statistics: taken "
            "for gamma and beta of a normalization. Name them in `names` if they are not."
        )
        return Converted(converted.state, (*converted.notes, note))
    return converted


def _translate(
    state: Mapping[str, Any],
    source: norms.Words,
    target: norms.Words,
    names: Names | None,
    counter: int,
    counts: Counts | None,
    notes: list[str],
) -> dict[str, Array]:
    """The arrays of `state` under their old names, with the numbers of the new ones."""
    import numpy as np

    norms.check_counts(counts)
    separator = SEPARATORS[source.framework]
    state = keys.leave_out(state, names, separator, notes)
    arrays = {key: _as_array(key, value) for key, value in state.items()}
    if widened := sum(_is_bfloat16(value) for value in state.values()):
        notes.append(f"{widened} array(s) of bfloat16 became float32, which holds the same values.")
    notes += keys.numbered(arrays, names, separator)
    layers = norms.checked_layers(arrays, source)
    counters = [source.key(layer, source.counter) for layer in layers]
    largest = max((int(arrays.get(key, 0)) for key in counters), default=0)
    arrays |= {key: np.asarray(counter, np.int64) for key in counters if key not in (names or {})}
    if layers:
        notes += [
            f"{source.counter} (here up to {largest}) is left out: {target.counter} is set to "
            f"{counter} in {len(layers)} layer(s). N counts the batches of fine-tuning, "
            "num_batches_tracked those of training, which matter with momentum=None only.",
            "eps and momentum (Chainer's 1 - decay) are not in the file: build the layers with "
            "those of the source. eps is 2e-5 by default in Chainer and 1e-5 in torch.",
        ]
        notes += norms.recount(arrays, layers, source, counts)
    return arrays


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


def _as_array(key: str, value: Any) -> Array:
    """`value` as a NumPy array; bfloat16, which NumPy does not have, becomes float32."""
    import numpy as np

    try:
        if hasattr(value, "detach"):
            value = (value.float() if _is_bfloat16(value) else value).detach().cpu()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{key!r} must be dense and of a dtype of NumPy: {error}. Save it as such."
        ) from error
    if array.dtype.kind not in "fiub":
        raise CheckpointError(
            f"{key!r} must be an array of real numbers: got {array.dtype}. Leave it out with "
            f"names={{{key!r}: None}}, or call an uninitialised model once before it is saved."
        )
    return array


def _meaningless(option: str, source: Path, target: Path) -> ValueError:
    suffixes = f"from {source.suffix} to {target.suffix}"
    return ValueError(f"`{option}` has no meaning {suffixes}: it must be left out.")


def _unwrapped(state: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    for wrapper in _WRAPPERS * 2:  # each may wrap the other
        if state and all(key.startswith(wrapper) for key in state):
            state = {key.removeprefix(wrapper): value for key, value in state.items()}
            notes.append(f"all keys began with {wrapper!r}, from a wrapper: it is removed.")
    return state


def _without_splits(state: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """The state with each SubBatchNorm as a plain batch norm, with the aggregated buffers."""
    for mark in [key for key in state if f".{key}".endswith(".split_bn.running_mean")]:
        layer = mark.removesuffix("split_bn.running_mean")  # "" or with a dot at its end
        whole, split = f"{layer}bn.", f"{layer}split_bn."
        if f"{whole}running_mean" not in state or f"{layer}running_mean" in state:
            continue
        state = {
            layer + key.removeprefix(whole) if key.startswith(whole) else key: value
            for key, value in state.items()
            if not key.startswith(split)
        }
        notes.append(
            f"{layer.rstrip('.')!r} is a SubBatchNorm: the statistics of the population (bn) are "
            "kept, those of each split (split_bn) are left out."
        )
    return state
