"""The user's own pair of models, in two frameworks, and its comparison on each rank."""

import math
import pkgutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from multibn._platform import importable
from multibn.checkpoint.translate import KEY_NAMES, _translate
from multibn.communicators import Communicator, SingleProcess
from multibn.parity import oracle
from multibn.parity.models import KINDS, ChainerModel, FlaxModel, Model, model_of
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Error

# Bounds of models, wider than those of single layers: rounding errors grow with depth.
MODEL_BOUNDS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


def compare_models(communicator: Communicator, path: str) -> list[Error]:
    """The errors of a pair of the user's models, which "module:function" returns. Collective.

    Each rank has a part of the example input, and batch normalization is synchronized; alone, the
    models get the whole input. A flax model runs alone only. Where options of layers differ, these
    are the errors.
    """
    first, second, x, unlike = load_pair(path)
    if unlike:
        return unlike
    alone, differs_alone = _steps([first, second], x)
    models = [m for m in load_pair(path, communicator)[:2] if not isinstance(m, FlaxModel)]
    indices = np.array_split(np.arange(len(x)), communicator.size)[communicator.rank]
    shared, differs = _steps(models, x[indices])
    one, two = (model.title.lower() for model in (first, second))
    errors = []
    for name, bound in MODEL_BOUNDS[x.dtype.name].items():
        whole = [arrays[name] for arrays in alone]
        parts = [arrays[name] for arrays in shared]
        cases: list[Any] = [(f"{one} and {two} alone", *whole, differs_alone)]
        if len(parts) == 2:
            cases += [(f"{one} and {two} on ranks", *parts, differs)]
        for of, got, right in zip((one, two), parts, whole, strict=False):
            cases += [(f"{of} alone and on ranks", got, right[indices], "")]
        for case, got, right, layer in cases:
            error = oracle.relative_error(got, right, whole[1])
            errors.append(Error(error / bound, error, bound, name, case, "models", "", layer))
    return errors


def find(path: str) -> Callable[[], Any]:
    """The user's function that "module:function" names; raises ValueError for anything else."""
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
    """The user's models, their input, and the errors of their options.

    The batch normalizations share with nobody, or with the ranks of a communicator. Without
    errors, the first model has the state of the second. Raises ValueError for what is no pair.
    """
    first, second, x = _call_factory(path, find(path))
    for model in (first, second):
        _set_ranks(path, model, SingleProcess())
        _check_call(f"the {model.title} model of {path}", model, x)
    if unlike := list(_option_differences(first, second)):
        return first, second, x, unlike
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
    """The pair and the example input that the user's function returns; raises for anything else."""
    import torch

    # All calls must return models with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    try:
        found = function()
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{path} has raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        ) from error
    each = found if isinstance(found, tuple | list) else (found,)
    given = [model for model in map(model_of, each) if model is not None]
    order = [KINDS.index(type(model)) for model in given]
    if (
        len(each) != 3
        or len({*order}) < 2
        or order != sorted(order)
        or not isinstance(each[2], np.ndarray)
    ):
        raise ValueError(
            f"{path} must return two of a torch.nn.Module, a chainer.Link and a flax.nnx.Module, "
            "in this order, and a NumPy array: got "
            f"{', '.join(type(v).__qualname__ for v in each)}."
        )
    (first, second), x = given, each[2]
    if isinstance(second, ChainerModel) and type(second.link).__name__ == "Classifier":
        raise ValueError(
            f"{path} must return a model without a loss: got an L.Classifier. Return its predictor."
        )
    if x.dtype.name not in MODEL_BOUNDS:
        raise ValueError(f"the example input must be float32 or float64: got {x.dtype} of {path}.")
    if len(x) < 3:  # two become 1 and -1, and dx is 0
        raise ValueError(f"the example input must have 3 or more samples: got {len(x)} of {path}.")
    return first, second, x


def _check_call(whose: str, model: Model, x: Array) -> None:
    """Raise unless a model takes the example; links that wait for an input get their size."""
    try:
        shape = model.evaluate(x).shape
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{whose} must take the example input, {x.dtype} of shape {x.shape}, and return an "
            f"array: got {type(error).__name__}: {error}"
        ) from error
    if shape[:1] != x.shape[:1]:
        raise ValueError(
            f"{whose} must return an array whose first axis is the batch of {len(x)} samples: "
            f"got shape {shape}. Return the output, not a loss."
        )


def _load(path: str, first: Any, second: Any) -> None:
    """Give the first model the state of the second."""
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
                f"the models of {path} must use unsynchronized layers, nn.BatchNorm2d and "
                f"L.BatchNormalization for example, which the comparison converts: got "
                f"{package}'s {name}."
            )


def _option_differences(first: Model, second: Model) -> Iterator[Error]:
    """An error for each pair of layers of one name whose options differ."""
    others = dict(second.options())
    for name, options in first.options():
        for option, value in options.items():
            other = others.get(name, {}).get(option, value)
            if value != other:
                text = f"{option} is {value} in {first.title}, {other} in {second.title}"
                yield Error(math.inf, math.inf, 0.0, option, name, "models", text)


def _steps(models: Sequence[Any], x: Array) -> tuple[list[Arrays], str]:
    """Return each model's arrays of a training step and an evaluation; and, see `_first_layer`."""
    arrays: list[Arrays] = []
    outputs: list[Arrays] = []
    for model in models:
        with model.outputs() as of_layers:
            y, dx = model.train(x)
        outputs.append(of_layers)
        arrays.append({"y": y, "dx": dx, "eval": model.evaluate(x)})
    return arrays, _first_layer(outputs[0], outputs[-1], MODEL_BOUNDS[x.dtype.name]["y"])


def _first_layer(of_first: Arrays, of_second: Arrays, bound: float) -> str:
    """Return the first layer, in the order of calls, whose output differs by more than `bound`."""
    for name, y in of_first.items():
        other = of_second.get(name, y)
        if other.shape != y.shape and other.ndim > 2:  # flax has the channels last
            other = np.moveaxis(other, -1, 1)
        if oracle.relative_error(y, other) > bound:
            return name
    return ""
