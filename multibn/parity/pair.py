"""Comparison of two models of the user, in different frameworks, on each rank."""

import math
import pkgutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, cast

import numpy as np

from multibn._platform import importable
from multibn.checkpoint.translate import KEY_NAMES, _translate
from multibn.communicators import Communicator, SingleProcess
from multibn.parity import oracle
from multibn.parity.models import KINDS, FlaxModel, Model, model_of
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Error

# Bounds of models, wider than those of single layers: rounding errors grow with depth.
MODEL_BOUNDS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


def compare_models(communicator: Communicator, path: str) -> list[Error]:
    """Return the errors of the two models that "module:function" returns. Collective.

    Alone, the models get the whole example input. On ranks, each rank gets a part, and batch
    normalization is synchronized. A flax model runs alone only. If options of layers differ, only
    these differences are returned.
    """
    first, second, x, differences = load_pair(path)
    if differences:
        return differences
    alone, layer_alone = _steps([first, second], x)
    on_ranks = [m for m in load_pair(path, communicator)[:2] if not isinstance(m, FlaxModel)]
    indices = np.array_split(np.arange(len(x)), communicator.size)[communicator.rank]
    shared, layer_on_ranks = _steps(on_ranks, x[indices])
    one, two = (model.title.lower() for model in (first, second))
    errors = []
    for name, bound in MODEL_BOUNDS[x.dtype.name].items():
        whole = [arrays[name] for arrays in alone]
        parts = [arrays[name] for arrays in shared]
        cases: list[Any] = [(f"{one} and {two} alone", *whole, layer_alone)]
        if len(parts) == 2:
            cases += [(f"{one} and {two} on ranks", *parts, layer_on_ranks)]
        for title, got, right in zip((one, two), parts, whole, strict=False):
            cases += [(f"{title} alone and on ranks", got, right[indices], "")]
        for case, got, right, layer in cases:
            error = oracle.relative_error(got, right, whole[1])
            errors.append(Error(error / bound, error, bound, name, case, "models", "", layer))
    return errors


def find(path: str) -> Callable[[], Any]:
    """Return the function "module:function"; raise ValueError if it cannot be imported."""
    if importable("chainer"):
        import multibn.chainer_backend  # noqa: F401 (makes Chainer importable)

    try:
        found = pkgutil.resolve_name(path)
        if not callable(found):
            raise TypeError(f"a {type(found).__qualname__} cannot be called")
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--model must be MODULE:FUNCTION, importable from this folder: got {path!r} "
            f"({type(error).__name__}: {error})."
        ) from error
    return cast(Callable[[], Any], found)


def load_pair(
    path: str, communicator: Communicator | None = None
) -> tuple[Any, Any, Array, list[Error]]:
    """Return the user's two models, their example input, and the options that differ.

    If none differ, the first model gets the state of the second. With a communicator, batch
    normalization is synchronized over its ranks. Raises ValueError if the pair is not valid.
    """
    first, second, x = _call_factory(path, find(path))
    for model in (first, second):
        _set_ranks(path, model, SingleProcess())
        _check_call(f"the {model.title} model of {path}", model, x)
    if differences := list(_option_differences(first, second)):
        return first, second, x, differences
    _load(path, first, second)
    if communicator is None:
        return first, second, x, []
    for model in (first, second):
        _set_ranks(path, model, communicator)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*statistics will not be synchronized: ")
            try:
                model.synchronize(communicator)
            except UserWarning as warning:
                raise ValueError(
                    f"the models of {path} must have layers that can be converted: {warning}"
                ) from warning
    return first, second, x, []


def _call_factory(path: str, function: Callable[[], Any]) -> tuple[Any, Any, Array]:
    """Call the user's function; return two models and the input, or raise for anything else."""
    import torch

    # All calls must return models with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    try:
        returned = function()
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{path} raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        ) from error
    values = returned if isinstance(returned, tuple | list) else (returned,)
    adapters = [model_of(value) for value in values[:2]]
    kinds: Any = tuple(map(type, adapters))
    has_array = len(values) == 3 and isinstance(values[2], np.ndarray)
    # A model of flax cannot load the state of the second.
    if not has_array or kinds not in combinations(KINDS, 2) or kinds[0] is FlaxModel:
        raise ValueError(
            f"{path} must return two of a torch.nn.Module, a chainer.Link and a Module of flax.nnx "
            "or flax.linen, in this order, and a NumPy array: got "
            f"{', '.join(type(v).__qualname__ for v in values)}."
        )
    (first, second), x = adapters, values[2]
    # Two samples would be normalized to 1 and -1, with dx = 0.
    if x.dtype.name not in MODEL_BOUNDS or x.shape[:1] < (3,):
        raise ValueError(
            f"the example input of {path} must be float32 or float64, with 3 or more samples: got "
            f"{x.dtype} of shape {x.shape}."
        )
    return first, second, x


def _check_call(whose: str, model: Model, x: Array) -> None:
    """Raise unless a model accepts the example input, which sets the size of links without one."""
    expected = (
        f"{whose} must accept the example input, {x.dtype} of shape {x.shape}, and return an array "
        "whose first axis is the batch, not a loss: got"
    )
    try:
        shape = model.evaluate(x).shape
    except (Exception, SystemExit) as error:
        raise ValueError(f"{expected} {type(error).__name__}: {error}") from error
    if shape[:1] != x.shape[:1]:
        raise ValueError(f"{expected} shape {shape}.")


def _load(path: str, first: Any, second: Any) -> None:
    """Load the state of the second model into the first."""
    try:
        source, target = (KEY_NAMES[model.title.lower()] for model in (second, first))
        first.load(_translate(second.state(), source, target, None).state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"the models of {path} must have layers of the same names and sizes: "
            f"{' '.join(str(error).split())}"
        ) from error


def _set_ranks(path: str, model: Model, ranks: Communicator) -> None:
    """Set the communicator of multibn's layers; raise for other synchronized layers."""
    for _, layer in model.layers():
        name, package = type(layer).__qualname__, type(layer).__module__.partition(".")[0]
        if hasattr(layer, "norm_options"):
            layer.process_group = ranks
        elif package == "multibn" and hasattr(layer, "comm"):
            layer.comm = ranks
        elif (package, name) == ("torch", "SyncBatchNorm") or "MultiNode" in name:
            raise ValueError(
                f"the models of {path} must use unsynchronized layers (nn.BatchNorm2d, "
                f"L.BatchNormalization), which the comparison converts: got {name} of {package}."
            )


def _option_differences(first: Model, second: Model) -> Iterator[Error]:
    """Yield an error for each option that differs between layers of the same name."""
    others = dict(second.options())
    for name, options in first.options():
        for option, value in options.items():
            other = others.get(name, {}).get(option, value)
            if value != other:
                text = f"{option} is {value} in {first.title}, {other} in {second.title}"
                yield Error(math.inf, math.inf, 0.0, option, name, "models", text)


def _steps(adapters: Sequence[Any], x: Array) -> tuple[list[Arrays], str]:
    """Train and evaluate each model; return the arrays, and the layer that `_first_layer` finds."""
    arrays: list[Arrays] = []
    outputs: list[Arrays] = []
    for model in adapters:
        with model.outputs() as layer_outputs:
            y, dx = model.train(x)
        outputs.append(layer_outputs)
        arrays.append({"y": y, "dx": dx, "eval": model.evaluate(x)})
    return arrays, _first_layer(outputs[0], outputs[-1], MODEL_BOUNDS[x.dtype.name]["y"])


def _first_layer(first: Arrays, second: Arrays, bound: float) -> str:
    """Return the first layer, in the order of calls, whose output differs by more than `bound`."""
    for name, y in first.items():
        other = second.get(name, y)
        if other.shape != y.shape and other.ndim > 2:  # flax has channels last
            other = np.moveaxis(other, -1, 1)
        if oracle.relative_error(y, other) > bound:
            return name
    return ""
