"""Conversion of a model's state between Chainer's npz, torch's state_dict and flax's variables.

Names change, and so do the layouts of flax's kernels and, on request, the convention of running
variances. Notes list the information that a file does not contain.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from multibn._typing import Array, check_number
from multibn.checkpoint import files
from multibn.checkpoint.files import CheckpointError, format_keys

# Maps old names of layers or arrays to new ones; None leaves the arrays out.
Names: TypeAlias = Mapping[str, str | None]


class Converted(NamedTuple):
    """The converted state of a model, and notes about what could not be converted.

    Attributes
    ----------
    state
        The arrays, by their new names.
    notes
        Messages about information that the source file does not contain.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import chainer_to_torch
    >>> state, notes = chainer_to_torch({"avg_mean": np.zeros(3), "avg_var": np.ones(3)})
    >>> list(state)
    ['running_mean', 'running_var', 'num_batches_tracked']
    >>> print(notes[0].partition(":")[0])
    set the eps and momentum of the source model in the target's layers
    """

    state: dict[str, Any]
    notes: tuple[str, ...]


class KeyNames(NamedTuple):
    """The names of arrays in a framework's state."""

    framework: str
    separator: str
    plain: tuple[str, str]  # weight and bias of most layers
    norm: tuple[str, str, str, str, str]  # scale, shift, mean, variance, counter of batch norm


CHAINER = KeyNames("chainer", "/", ("W", "b"), ("gamma", "beta", "avg_mean", "avg_var", "N"))
TORCH = KeyNames(
    "torch",
    ".",
    ("weight", "bias"),
    ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
)
# flax counts no batches: the last name is torch's, and is never written.
FLAX = KeyNames(
    "flax",
    ".",
    ("kernel", "bias"),
    ("scale", "bias", *files.FLAX_STATISTICS, "num_batches_tracked"),
)
KEY_NAMES = {names.framework: names for names in (CHAINER, TORCH, FLAX)}


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    names: Names | None = None,
    prefix: str = "",
    source: Literal["torch", "flax"] | None = None,
    target: Literal["torch", "flax"] | None = None,
    transposed: Collection[str] = (),
    count: float | None = None,
) -> Converted:
    """Convert the model in a checkpoint file to a file of the same or a different framework.

    The suffix determines the format: .npz is Chainer's; .pt, .pth (torch.save) and .safetensors are
    torch's; .msgpack (flax.serialization) is flax's, with the collections `params` and
    `batch_stats`. Within one framework, only the format and the names in `names` change.

    `dst` is replaced atomically, and is unchanged after any error. Only tensors are unpickled
    (`weights_only=True`, `allow_pickle=False`).

    Parameters
    ----------
    src, dst
        Paths. The folder of `dst` must exist.
    prefix
        Convert only the keys below this one: `"updater/model:main"` for the snapshot of a Chainer
        trainer, `"model"` or `"state_dict"` for the dict that a training script saves with torch.
    names
        See `chainer_to_torch`. Omit `prefix` from the keys, and flax's collection.
    source, target
        `"flax"` for a .safetensors file of flax's variables, whose names begin with the collection.
    transposed
        Names in `src` of the layers that are ConvTranspose in flax (with
        `transpose_kernel=False`): a file does not show whether a kernel belongs to Conv.
    count
        Elements per channel of a batch, n. If given, running variances are converted from or to
        flax's convention: biased in flax, unbiased, n/(n-1) times as large, in torch and Chainer.
        By default they are copied unchanged.

    Returns
    -------
    Converted
        The arrays written, and the notes.

    Raises
    ------
    CheckpointError
        If a file cannot be read or converted. The message begins with the file's path.
    OSError
        If a file cannot be written.

    Examples
    --------
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
    read, written = Path(src), Path(dst)
    old = KEY_NAMES[files.framework(read, source)]
    new = KEY_NAMES[files.framework(written, target)]
    if count is not None:
        check_number("count", count, "(1, inf)")
    state = files.read(read, prefix, source)
    try:
        converted = _translate(state, old, new, names, transposed, count)
    except CheckpointError as error:
        raise CheckpointError(f"{read}: {error}") from error
    files.write(written, converted.state, target)
    return converted


def chainer_to_torch(arrays: Mapping[str, Array], /, *, names: Names | None = None) -> Converted:
    """Translate the state of a Chainer model to torch's names.

    `predictor/bn/gamma` becomes `predictor.bn.weight`: gamma and W -> weight, beta and b -> bias,
    avg_mean -> running_mean, avg_var -> running_var. The layouts of Linear, EmbedID, convolutions
    and deconvolutions are the same in both frameworks.

    Parameters
    ----------
    arrays
        A dict that maps the names in the npz file, `a/b/W` for example, to arrays.
    names
        Maps names of layers or arrays in the source to names in the target. Keys are prefixes,
        `{"predictor": ""}`, or whole keys, `{"bn/gamma": "norm.weight"}`; the longest match wins.
        None leaves the arrays out.

    Returns
    -------
    Converted
        NumPy arrays under torch's names, `a.b.weight` for example. Dtypes do not change.

    Raises
    ------
    CheckpointError
        If a key is unknown, a value is not an array of real numbers, two keys get the same name, or
        an entry of `names` matches no key.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import chainer_to_torch
    >>> list(chainer_to_torch({"bn/gamma": np.ones(8), "bn/beta": np.zeros(8)}).state)
    ['bn.weight', 'bn.bias']
    """
    return _translate(arrays, CHAINER, TORCH, names)


def torch_to_chainer(state: Mapping[str, Any], /, *, names: Names | None = None) -> Converted:
    """Translate the torch model's `state` to Chainer's names; the inverse of `chainer_to_torch`.

    A one-dimensional weight with a bias, but without running statistics, becomes the gamma of a
    normalization layer; without a bias, the weight must be in `names`. The entry `{"module": ""}`
    of `names` strips the prefix that DistributedDataParallel adds. `{"bn.split_bn": None, "bn.bn":
    "bn"}` converts the SubBatchNorm `bn` to a plain layer with the statistics of all its splits.

    `state` maps torch's names to tensors. `names`, the result and the errors are those of
    `chainer_to_torch`. bfloat16, which NumPy lacks, becomes float32.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.checkpoint import torch_to_chainer
    >>> list(torch_to_chainer({"bn.weight": np.ones(8), "bn.bias": np.zeros(8)}).state)
    ['bn/gamma', 'bn/beta']
    """
    return _translate(state, TORCH, CHAINER, names)


def _translate(
    state: Mapping[str, Any],
    source: KeyNames,
    target: KeyNames,
    names: Names | None,
    transposed: Collection[str] = (),
    count: float | None = None,
) -> Converted:
    import numpy as np

    old, new = source.separator, target.separator
    names = names or {}
    if not isinstance(names, Mapping) or not all(isinstance(v or "", str) for v in names.values()):
        raise CheckpointError(f"`names` must map str to str or None: got {names!r:.99}.")
    if unmatched := [n for n in names if not any(_is_below(key, n, old) for key in state)]:
        raise CheckpointError(
            "every entry of `names` must match a key or a prefix: no key matches "
            f"{format_keys(unmatched)}. Correct or remove these entries."
        )
    layers = {key.rpartition(old)[0] for key in state}
    if unmatched := [layer for layer in transposed if layer not in layers]:
        raise CheckpointError(
            "every entry of `transposed` must be the name of a layer: no array belongs to "
            f"{format_keys(unmatched)}. Correct or remove these entries."
        )
    norms: list[str] = []
    if source is not target:
        *_, mean, var, counter = source.norm
        norms = [key.removesuffix(mean) for key in state if key.rpartition(old)[2] == mean]
        state = {key: files.to_numpy(state, key) for key in state}
        state |= {n + counter: np.asarray(0, np.int64) for n in norms if n + counter not in names}
        if target is FLAX:
            state = {key: state[key] for key in state if key.rpartition(old)[2] != counter}
    origins: dict[str, str] = {}
    unknown, numbered = [], []
    for key in state:
        leaf = key.rpartition(old)[2]
        layer = key.removesuffix(leaf)
        rule = max((name for name in names if _is_below(key, name, old)), key=len, default="")
        name = names.get(rule, "")
        if name is None:
            continue
        if rule != key:
            rest = layer[len(rule) :].strip(old)
            new_leaf = leaf
            if source is not target:
                new_leaf = _counterparts(state, layer, source, target).get(leaf, "")
                if not new_leaf or (new != old and new in rest):
                    unknown.append(key)
                    continue
                if any(map(str.isdigit, rest.split(old))):
                    numbered.append(key)
            name = new.join(filter(None, (name, rest.replace(old, new), new_leaf)))
        if not name or not name.isprintable() or name in origins:
            raise CheckpointError(
                f"new names must be unique and printable: {key!r:.99} would become {name!r:.99}"
                f"{f', as {origins[name]!r:.99} does' if name in origins else ''}. Set a "
                "different name in `names`."
            )
        origins[name] = key
    if unknown:
        raise CheckpointError(
            f"no name in {target.framework} is known for {format_keys(unknown)}. Map them in "
            "`names` (None leaves an array out), or select the model with `prefix`."
        )
    if not origins:
        raise CheckpointError(
            "no arrays are left to convert: `names` maps every key to None, or the state is empty."
        )
    notes = []
    for wrapper in ("module", "_orig_mod"):  # DistributedDataParallel, torch.compile
        if all(name.startswith(wrapper + new) for name in origins):
            notes.append(
                f"all keys start with {wrapper!r}, the prefix of a wrapper: pass `prefix` "
                f"{wrapper!r} (--prefix {wrapper}) to strip it."
            )
    if numbered:
        notes.append(
            f"the numbers in {format_keys(numbered)} are kept unchanged, which is correct for a "
            "ChainList. chainer.Sequential numbers links in a different order and does not count "
            "functions: map the numbers in `names`, see docs/guides/from-chainermn-to-torch.md."
        )
    _, _, mean, new_var, counter = target.norm
    old_means = {
        key.rpartition(old)[2] for name, key in origins.items() if name.rpartition(new)[2] == mean
    }
    if old_means - {mean}:
        starts = f" {counter} starts at 0." if norms and target is not FLAX else ""
        copied = f" {new_var} is copied unchanged, biased or unbiased." if count is None else ""
        notes.append(
            "set the eps and momentum of the source model in the target's layers: they are not "
            "stored in checkpoints. The default eps is 2e-5 in Chainer, 1e-3 in Keras, and 1e-5 in "
            "torch, flax and Paddle. torch's momentum is 1 - decay, and 1 - the momentum of Keras, "
            f"flax and Paddle.{copied}{starts}"
        )
    converted = {name: state[key] for name, key in origins.items()}
    if source is not target and FLAX in (source, target):
        notes += _flax_notes(state, source)
        for name, key in origins.items():
            layer, _, leaf = key.rpartition(old)
            a = _convert_layout(state, key, name, source, target, layer in transposed)
            if count is not None and leaf == var:
                factor = (count - 1) / count if target is FLAX else count / (count - 1)
                a = (a * factor).astype(a.dtype)
            converted[name] = a
    return Converted(converted, tuple(notes))


def _convert_layout(
    state: Mapping[str, Any],
    key: str,
    name: str,
    source: KeyNames,
    target: KeyNames,
    transposed: bool,
) -> Array:
    """Return `state[key]`, whose new name is `name`, in the layout of `target`.

    torch's `(out, in, *spatial)` is flax's `(*spatial, in, out)`. The weight of a transposed
    convolution, torch's `(in, out, *spatial)`, is flax's `(*spatial, in, out)` with flipped spatial
    axes: torch computes the gradient of a convolution, flax convolves a dilated input.
    """
    import numpy as np

    value = state[key]
    leaf = (name if target is FLAX else key).rpartition(FLAX.separator)[2]
    if leaf != FLAX.plain[0] or value.ndim < 2:
        return value
    bias = state.get(key.removesuffix(source.plain[0]) + source.plain[1])
    if target is FLAX and bias is not None and value.ndim > 2:
        transposed |= bias.shape[0] != value.shape[0]  # the weight is (in, out, *spatial)
    of_flax = (-2, -1) if transposed else (-1, -2)
    value = np.moveaxis(value, *(((0, 1), of_flax) if target is FLAX else (of_flax, (0, 1))))
    spatial = range(value.ndim - 2) if target is FLAX else range(2, value.ndim)
    return np.flip(value, tuple(spatial)) if transposed else value


def _flax_notes(state: Mapping[str, Any], source: KeyNames) -> list[str]:
    """Return the notes on a conversion from or to flax."""
    notes = [
        "flax's activations are (N, *spatial, C): transpose inputs. If a Dense follows a flattened "
        "feature map, permute the rows of the Dense: a file does not show the shape of this map.",
    ]
    if any(key.endswith(source.norm[2]) for key in state):
        notes.append(
            "running variance is biased in flax, unbiased in torch and Chainer: pass `count` "
            "(--count), the elements per channel of a batch, to convert running variances."
        )
    if any(key.endswith(source.plain[0]) and a.ndim > 2 for key, a in state.items()):
        notes.append(
            "kernels of more than two axes are assumed to belong to Conv: list the layers that are "
            "ConvTranspose in `transposed` (--transposed)."
        )
    return notes


def _counterparts(
    state: Mapping[str, Any], layer: str, source: KeyNames, target: KeyNames
) -> dict[str, str]:
    """Return a dict from the last parts of a layer's names in `source` to those in `target`."""
    plain = dict(zip(source.plain, target.plain, strict=True))
    norm = dict(zip(source.norm, target.norm, strict=True))
    if source is FLAX:
        is_norm = any(layer + name in state for name in (source.norm[0], source.norm[2]))
        return norm if is_norm else plain | {"embedding": target.plain[0]}
    if source is CHAINER or layer + source.norm[2] in state:
        return plain | norm
    weight, bias = (getattr(state.get(layer + name), "shape", None) for name in source.plain)
    if weight is None or (len(weight) > 1 and weight != bias):
        return plain
    # Any other weight may belong to PReLU, RMSNorm, LayerNorm over two axes...
    return norm if len(weight) == 1 and weight == bias else {"bias": target.plain[1]}


def _is_below(key: str, name: str, separator: str) -> bool:
    return not name or key == name or key.startswith(name + separator)
