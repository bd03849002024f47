"""The user's own pair of models, in torch and in Chainer, and its comparison on each rank."""

import importlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from multibn.communicators import Communicator, SingleProcess
from multibn.options import NormOptions
from multibn.parity import oracle
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Chainer, Error, Torch

# Bounds of models, wider than those of single layers: rounding errors grow with depth.
MODEL_BOUNDS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


def compare_models(communicator: Communicator, path: str) -> list[Error]:
    """The errors of a pair of the user's models, which "module:function" returns. Collective.

    Each rank has a part of the example input, and batch normalization is synchronized; alone, the
    models get the whole input. Where options of layers differ, these are the errors.
    """
    torch_model, chainer_model, x, unlike = load_pair(path)
    if unlike:
        return unlike
    alone, first_alone = _steps(torch_model, chainer_model, x)
    torch_model, chainer_model, *_ = load_pair(path, communicator)
    indices = np.array_split(np.arange(len(x)), communicator.size)[communicator.rank]
    shared, first_shared = _steps(torch_model, chainer_model, x[indices])
    errors = []
    for name, bound in MODEL_BOUNDS[x.dtype.name].items():
        torchs, chainers = (arrays[name] for arrays in alone)
        of_torch, of_chainer = (arrays[name] for arrays in shared)
        for case, got, right, layer in (
            ("torch and chainer alone", torchs, chainers, first_alone),
            ("torch and chainer on ranks", of_torch, of_chainer, first_shared),
            ("torch alone and on ranks", of_torch, torchs[indices], ""),
            ("chainer alone and on ranks", of_chainer, chainers[indices], ""),
        ):
            error = oracle.relative_error(got, right, chainers)
            errors.append(Error(error / bound, error, bound, name, case, "models", "", layer))
    return errors


def find(path: str) -> Callable[[], Any]:
    """The user's function that "module:function" names."""
    import multibn.chainer_backend  # noqa: F401 (makes Chainer importable)

    module, _, name = path.partition(":")
    if not name:
        raise ValueError("no :FUNCTION")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise ValueError(f"a {type(found).__qualname__}, which cannot be called")
    return cast(Callable[[], Any], found)


def load_pair(
    path: str, communicator: Communicator | None = None
) -> tuple[Any, Any, Array, list[Error]]:
    """The user's models, their input, and the errors of their options.

    The batch normalizations share with nobody, or with the ranks of a communicator. Without
    errors, torch's model has the state of Chainer's. Raises ValueError for what is no pair.
    """
    function = find(path)  # makes Chainer importable
    from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    # isort: split
    from chainer import links as L

    torch_model, chainer_model, x = _call_factory(path, function)
    _set_ranks(path, torch_model, chainer_model, SingleProcess())
    _check_call(f"the torch model of {path}", Torch(torch_model), x)
    _check_call(f"the Chainer model of {path}", Chainer(chainer_model), x)
    if unlike := list(_option_differences(torch_model, chainer_model)):
        return torch_model, chainer_model, x, unlike
    _load(path, torch_model, chainer_model)
    if communicator is not None:
        _set_ranks(path, torch_model, chainer_model, communicator)
        links = list(chainer_model.links())
        is_plain = not any(isinstance(link, MultiNodeBatchNormalization) for link in links)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*statistics will not be synchronized: ")
            try:
                torch_model = convert_sync_batchnorm(torch_model, communicator)
                if is_plain or any(isinstance(link, L.BatchNormalization) for link in links):
                    chainer_model = create_mnbn_model(chainer_model, communicator)
            except UserWarning as warning:
                raise ValueError(
                    f"the models of {path} must have layers that can be converted: {warning}"
                ) from warning
    return torch_model, chainer_model, x, []


def _call_factory(path: str, function: Callable[[], Any]) -> tuple[Any, Any, Array]:
    """The pair and the example input that the user's function returns; raises for anything else."""
    import chainer
    import torch
    from chainer import links as L
    from torch import nn

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
    kinds = nn.Module, chainer.Link, np.ndarray
    if len(each) != 3 or not all(map(isinstance, each, kinds)):
        raise ValueError(
            f"{path} must return a torch.nn.Module, a chainer.Link and a NumPy array: got "
            f"{', '.join(type(v).__qualname__ for v in each)}."
        )
    torch_model, chainer_model, x = each
    if isinstance(chainer_model, L.Classifier):
        raise ValueError(
            f"{path} must return a model without a loss: got an L.Classifier. Return its predictor."
        )
    if x.dtype.name not in MODEL_BOUNDS:
        raise ValueError(f"the example input must be float32 or float64: got {x.dtype} of {path}.")
    if len(x) < 3:  # two become 1 and -1, and dx is 0
        raise ValueError(f"the example input must have 3 or more samples: got {len(x)} of {path}.")
    return torch_model, chainer_model, x


def _check_call(whose: str, model: Torch | Chainer, x: Array) -> None:
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


def _load(path: str, torch_model: Any, chainer_model: Any) -> None:
    """Give torch's model the state of Chainer's."""
    import torch
    from chainer.serializers import DictionarySerializer

    from multibn import checkpoint

    serializer = DictionarySerializer()
    serializer.save(chainer_model)
    state = checkpoint.chainer_to_torch(serializer.target).state
    try:
        torch_model.load_state_dict({name: torch.tensor(a) for name, a in state.items()})
    except RuntimeError as error:
        raise ValueError(
            f"the models of {path} must have layers of the same names and sizes: "
            f"{' '.join(str(error).split())}"
        ) from error


def _set_ranks(path: str, torch_model: Any, chainer_model: Any, ranks: Communicator) -> None:
    """Set the communicator of multibn's layers; raise for other synchronized layers."""
    from torch import nn

    from multibn.chainer_backend import MultiNodeBatchNormalization
    from multibn.torch_backend import SyncBatchNorm

    for layer in (*torch_model.modules(), *chainer_model.links()):
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = ranks
        elif isinstance(layer, MultiNodeBatchNormalization):
            layer.comm = ranks
        elif isinstance(layer, nn.SyncBatchNorm) or "MultiNode" in type(layer).__name__:
            kind = f"{type(layer).__module__.partition('.')[0]}'s {type(layer).__qualname__}"
            raise ValueError(
                f"the models of {path} must use unsynchronized layers, nn.BatchNorm2d and "
                f"L.BatchNormalization for example, which the comparison converts: got {kind}."
            )


def _option_differences(torch_model: Any, chainer_model: Any) -> Iterator[Error]:
    """An error for each pair of layers of one name whose options differ."""
    links = {path[1:].replace("/", "."): link for path, link in chainer_model.namedlinks()}
    for name, layer in torch_model.named_modules():
        link: Any = links.get(name)
        if not (hasattr(layer, "eps") and hasattr(link, "eps")):
            continue
        of_torch, of_chainer = (vars(NormOptions.of(v)) for v in (layer, link))
        options = {name: [v, of_chainer[name]] for name, v in of_torch.items()}
        del options["fuse_relu"]  # the other model may have a ReLU of its own
        if hasattr(layer, "running_var") and hasattr(link, "avg_var"):
            options["momentum (1 - decay)"] = [layer.momentum, round(1 - link.decay, 12)]
            options["affine (gamma)"] = [layer.weight is not None, link.gamma is not None]
            options["bias (beta)"] = [layer.bias is not None, link.beta is not None]
            options["running_var (avg_var)"] = [
                getattr(layer, "running_var_convention", "unbiased_global"),
                getattr(link, "avg_var_convention", "unbiased_global"),
            ]
        for option, (torchs, chainers) in options.items():
            if torchs != chainers:
                text = f"{option} is {torchs} in torch, {chainers} in Chainer"
                yield Error(math.inf, math.inf, 0.0, option, name, "models", text)


def _steps(torch_model: Any, chainer_model: Any, x: Array) -> tuple[list[Arrays], str]:
    """Return each model's arrays of a training step and an evaluation; and, see `_first_layer`."""
    surfaces: tuple[Any, ...] = Torch(torch_model), Chainer(chainer_model)
    arrays, outputs = [], []
    for surface, recorded in zip(surfaces, (_torch_outputs, _chainer_outputs), strict=True):
        with recorded(torch_model, chainer_model) as of_layers:
            y, dx = surface.train(x)
        outputs.append(of_layers)
        arrays.append({"y": y, "dx": dx, "eval": surface.evaluate(x)})
    of_torch, of_chainer = outputs
    return arrays, _first_layer(of_torch, of_chainer, MODEL_BOUNDS[x.dtype.name]["y"])


def _first_layer(of_torch: Arrays, of_chainer: Arrays, bound: float) -> str:
    """Return the first layer, in the order of calls, whose output differs by more than `bound`."""
    differing = (
        name
        for name, y in of_torch.items()
        if name in of_chainer and oracle.relative_error(y, of_chainer[name]) > bound
    )
    return next(differing, "")


@contextmanager
def _torch_outputs(model: Any, _: Any) -> Iterator[Arrays]:
    """Record the output of each layer's first call, by the layer's name, but not the model's."""
    outputs: Arrays = {}

    def record(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_layer: Any, _args: Any, y: Any) -> None:
            if hasattr(y, "detach"):
                outputs.setdefault(name, y.detach().numpy().copy())

        return hook

    named = [(name, layer) for name, layer in model.named_modules() if name]
    hooks = [layer.register_forward_hook(record(name)) for name, layer in named]
    yield outputs
    for hook in hooks:
        hook.remove()


@contextmanager
def _chainer_outputs(_: Any, model: Any) -> Iterator[Arrays]:
    """Record as `_torch_outputs`."""
    from chainer import LinkHook

    outputs: Arrays = {}
    names = {id(link): path[1:].replace("/", ".") for path, link in model.namedlinks()}

    class Recorder(LinkHook):
        def forward_postprocess(self, args: Any) -> None:
            if hasattr(args.out, "array"):
                outputs.setdefault(names.get(id(args.link), ""), args.out.array.copy())

    with Recorder():
        yield outputs
