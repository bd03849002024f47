"""Translates a model's state between Chainer's npz and torch's state_dict.

Translates names; values never change. Notes say what a file does not contain. Nothing in a file is
executed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multibn._typing import Array
from multibn.checkpoint import files, keys
from multibn.checkpoint.files import CheckpointError
from multibn.checkpoint.keys import CHAINER, TORCH, Converted, Names, Words

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and of torch.compile


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    names: Names | None = None,
    prefix: str = "",
    skip_unknown: bool = False,
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
    names, skip_unknown
        As `chainer_to_torch`. The keys in `names` are without `prefix`.

    Returns
    -------
    Converted
        The arrays written, and the notes.

    Raises
    ------
    CheckpointError
        If a file cannot be read, converted or written: the message begins with its name.

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
    with files.about(target):
        to = files.check_target(target, [source])
    with files.about(source):
        state = files.read(source, prefix)
        source_words, target_words = keys.WORDS[files.framework(source)], keys.WORDS[to]
        converted = _translate(state, source_words, target_words, names, skip_unknown)
    with files.about(target):
        files.write(target, converted.state)
    return converted


def chainer_to_torch(
    arrays: Mapping[str, Array],
    /,
    *,
    names: Names | None = None,
    skip_unknown: bool = False,
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

    Returns
    -------
    Converted
        NumPy arrays of unchanged dtypes by torch's names, `a.b.weight`.

    Raises
    ------
    CheckpointError
        If a key is unknown, a shape is not valid, two keys get one name, or an entry of `names`
        matches no key.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import chainer_to_torch
    >>> list(chainer_to_torch({"bn/gamma": np.ones(8), "bn/beta": np.zeros(8)}).state)
    ['bn.weight', 'bn.bias']
    """
    return _translate(arrays, CHAINER, TORCH, names, skip_unknown)


def torch_to_chainer(
    state: Mapping[str, Any],
    /,
    *,
    names: Names | None = None,
    skip_unknown: bool = False,
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
    names, skip_unknown
        As `chainer_to_torch`, from torch's names to Chainer's.

    Returns
    -------
    Converted
        NumPy arrays by Chainer's names. Dtypes are unchanged, but bfloat16, which NumPy does not
        have, becomes float32.

    Raises
    ------
    CheckpointError
        As `chainer_to_torch`.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import torch_to_chainer
    >>> list(torch_to_chainer({"bn.weight": np.ones(8), "bn.bias": np.zeros(8)}).state)
    ['bn/gamma', 'bn/beta']
    """
    return _translate(state, TORCH, CHAINER, names, skip_unknown)


def _translate(
    state: Mapping[str, Any], source: Words, target: Words, names: Names | None, skip_unknown: bool
) -> Converted:
    notes: list[str] = []
    names = names or {}
    if (source, target) == (TORCH, CHAINER):
        state = _without_splits(_unwrapped(state, notes), notes)
    state = keys.leave_out(state, names, source.separator, notes)
    if source is not target:
        if widened := sum(map(_is_bfloat16, state.values())):
            notes.append(f"{widened} array(s) of bfloat16 became float32, with the same values.")
        state = {key: _as_array(key, value) for key, value in state.items()}
        notes += keys.numbered(state, names, source.separator)
        state = _with_new_counters(state, source, target, names, notes)
    return keys.rename(state, source, target, names, skip_unknown, notes)


def _with_new_counters(
    arrays: dict[str, Array], source: Words, target: Words, names: Names, notes: list[str]
) -> dict[str, Array]:
    """The arrays with 0 for each counter of batches; notes on what a file does not say."""
    import numpy as np

    *_, mean, var, counter = source.norm
    layers = keys.layers(arrays, source.separator)
    norms = [name for name, leaves in layers.items() if {mean, var} & leaves.keys()]
    for name in norms:
        _check_norm(name.rstrip(source.separator), layers[name], source)
    largest = max((int(layers[name].get(counter, 0)) for name in norms), default=0)
    if largest:
        notes.append(
            f"{counter} (here up to {largest}) is left out: {target.norm[-1]} is set to 0 in "
            f"{len(norms)} layer(s). N counts the batches of fine-tuning, num_batches_tracked "
            "those of training, which matter with momentum=None only."
        )
    if norms:
        notes.append(
            "eps and momentum (Chainer's 1 - decay) are not in the file: build the layers with "
            "those of the source. eps is 2e-5 by default in Chainer and 1e-5 in torch. Nor does "
            f"the file say by which count {var} is unbiased: that of one rank (ChainerMN, "
            "nn.BatchNorm), of all ranks (multibn, nn.SyncBatchNorm), or none."
        )
    taken = sum(
        keys.counterparts(leaves, source, target).get("weight") == "gamma"
        for name, leaves in layers.items()
        if name not in norms
    )
    if taken:
        notes.append(
            f"{taken} layer(s) have one-dimensional weights and no running statistics: taken for "
            "gamma and beta of a normalization. Name them in `names` if they are not."
        )
    counters = [name + counter for name in norms if name + counter not in names]
    return arrays | {key: np.asarray(0, np.int64) for key in counters}


def _check_norm(name: str, leaves: Mapping[str, Array], words: Words) -> None:
    """Raise unless the arrays of a batch normalization are valid."""
    *_, mean, var, counter = words.norm
    arrays = {leaf: leaves[leaf] for leaf in words.norm if leaf in leaves}
    said = ", ".join(f"{leaf} {a.dtype} {a.shape or a}" for leaf, a in arrays.items())
    number = arrays.pop(counter, None)
    if (
        not {mean, var} <= arrays.keys()
        or len({a.shape for a in arrays.values()}) > 1
        or any(a.ndim != 1 or a.dtype.kind != "f" for a in arrays.values())
        or (number is not None and (number.ndim or number.dtype.kind not in "iu" or number < 0))
    ):
        raise CheckpointError(
            f"the batch normalization {name!r} must have {mean} and {var}, all of its arrays "
            f"floating-point of one shape (C,), and one integer {counter}, if any, of 0 or more: "
            f"got {said}. Save the model again, or leave the layer out with `names`."
        )


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
