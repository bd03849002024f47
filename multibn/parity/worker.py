"""The work of each rank of the parity command: trains layers or models, and finds their errors.

A surface is a framework's layer or model behind one small interface of NumPy arrays. A rank
compares when all communication is over, so that it cannot fail and leave the other ranks waiting
in a collective. Only functions import frameworks.
"""

import importlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np

from multibn.communicators import Communicator, SingleProcess
from multibn.parity import oracle
from multibn.parity.cases import CASES, CHANNELS, EPS, MOMENTUM, Case
from multibn.parity.oracle import Array

# One rank's arrays by "step/quantity"; gradients of weight and bias are means over the ranks.
Arrays = dict[str, Array]

QUANTITIES = ("y", "dx", "dweight", "dbias", "running_mean", "running_var")  # of a step

# Bounds of models, wider than those of single layers: rounding errors grow with depth.
OF_MODELS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}


class Error(NamedTuple):
    """The error of a quantity on a rank in a step; NaN counts as infinite."""

    ratio: float  # of the error to its bound
    error: float  # relative to the largest expected entry
    bound: float
    quantity: str
    case: str
    surface: str
    text: str = ""  # of an option that differs, whose error is infinite


class Torch:
    """A module of torch, called by `call`."""

    def __init__(self, module: Any, call: Callable[..., Any] | None = None) -> None:
        self.module, self.call = module, call or module

    @staticmethod
    def state(module: Any) -> list[Array]:
        """Gradients of weight and bias as the framework gives them, and running statistics."""
        both = module.weight.grad, module.bias.grad, module.running_mean, module.running_var
        return list(map(_from_torch, both))

    def train(self, x: Array, dy: Array | None = None, **masks: Array) -> tuple[Array, Array]:
        """The output and the gradient of `x`; without `dy`, down the sum of y**3 / 3.

        Of the sum of y, or of y**2, batch normalization gives dx = 0.
        """
        t = _to_torch(x).requires_grad_()
        self.module.train().zero_grad()
        y = self.call(t, **{name: _to_torch(a) for name, a in masks.items()})
        y.backward(y.detach() ** 2 if dy is None else _to_torch(dy))
        return _from_torch(y), _from_torch(t.grad)

    def evaluate(self, x: Array, **masks: Array) -> Array:
        """The output in evaluation."""
        import torch

        with torch.no_grad():
            tensors = {name: _to_torch(a) for name, a in masks.items()}
            return _from_torch(self.module.eval()(_to_torch(x), **tensors))


def _to_torch(a: Array) -> Any:
    """A tensor on the device where torch makes tensors."""
    import torch

    return torch.from_numpy(a).to(torch.get_default_device())


def _from_torch(t: Any) -> Array:
    return np.asarray(t.detach().cpu())


class Chainer:
    """A link of Chainer, called by `call`."""

    state = attrgetter("gamma.grad", "beta.grad", "avg_mean", "avg_var")

    def __init__(self, link: Any, call: Callable[..., Any] | None = None) -> None:
        self.module, self.call = link, call or link

    def train(self, x: Array, dy: Array | None = None, **masks: Array) -> tuple[Array, Array]:
        import chainer

        v = chainer.Variable(x)
        self.module.cleargrads()
        y = self.call(v, **masks)
        y.grad = y.array**2 if dy is None else dy
        y.backward()
        return y.array, v.grad

    def evaluate(self, x: Array, **masks: Array) -> Array:
        import chainer

        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return np.asarray(self.module(x, **masks).array)


def torch_layer(case: Case, communicator: Communicator) -> Torch:
    """multibn.torch.SyncBatchNorm."""
    from torch.utils.checkpoint import checkpoint

    from multibn.torch_backend import SyncBatchNorm, checkpoint_contexts

    weight, bias = map(_to_torch, case.parameters())
    layer = SyncBatchNorm(
        CHANNELS,
        EPS,
        None if case.cumulative else MOMENTUM,
        process_group=communicator,
        weighting=case.weighting,
        running_var=case.running_var,
        dtype=weight.dtype,
    )
    layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    options: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    return Torch(layer, partial(checkpoint, layer, **options) if case.recompute else None)


def chainer_layer(case: Case, communicator: Communicator) -> Chainer:
    """multibn.chainer.MultiNodeBatchNormalization."""
    from multibn.chainer_backend import MultiNodeBatchNormalization

    # isort: split
    from chainer.functions import forget

    weight, bias = case.parameters()
    link: Any = MultiNodeBatchNormalization(
        CHANNELS,
        communicator,
        1 - MOMENTUM,
        EPS,
        weight.dtype,
        weighting=case.weighting,
        avg_var=case.running_var,
    )
    link.gamma.array[...], link.beta.array[...] = weight, bias
    link.avg_var[...] = 1

    def call(v: Any, **options: Any) -> Any:
        one = partial(link, finetune=case.cumulative, **options)
        return forget(one, v) if case.recompute else one(v)

    return Chainer(link, call)


SURFACES: dict[str, Any] = {"torch": torch_layer, "chainer": chainer_layer}


def measure(
    communicator: Communicator, surfaces: Sequence[str], cases: Sequence[str] = (), model: str = ""
) -> list[Error]:
    """This rank's errors of layers in the cases of these names, or of models. Collective."""
    if model:
        return models(communicator, model)
    arrays = {
        (case, surface): train(surface, case, communicator)
        for case in CASES
        if case.name in cases
        for surface in surfaces
    }
    rank, size = communicator.rank, communicator.size
    return [
        e for (case, surface), a in arrays.items() for e in compare(surface, case, a, rank, size)
    ]


def train(surface: str, case: Case, communicator: Communicator) -> Arrays:
    """Train a layer. Collective."""
    layer = SURFACES[surface](case, communicator)
    arrays: Arrays = {}
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.padding is None else {"mask": masks[rank]}
        y_and_dx = layer.train(xs[rank], dys[rank], **arguments)
        dweight, dbias, *running = (np.asarray(a).copy() for a in layer.state(layer.module))
        # Optimizers average so. torch's gradients are each rank's sums; Chainer's are means.
        means = [communicator.allreduce(a.astype(np.float64)) / size for a in (dweight, dbias)]
        arrays |= _named(step, *y_and_dx, *means, *running)
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    return arrays


@lru_cache(1)  # one surface after the other
def expected(case: Case, rank: int, size: int) -> Arrays:
    """The right results of `train` on this rank."""
    arrays: Arrays = {}
    running = np.zeros(CHANNELS), np.ones(CHANNELS)
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        whole = oracle.batch_norm(
            xs, dys, *case.parameters(), eps=EPS, weighting=case.weighting, masks=masks
        )
        count = masks[rank].sum() if case.running_var == "unbiased_local" else whole.count
        factor = 1.0 if case.running_var == "biased" else count / max(count - 1, 1)
        momentum = 1 / (step + 1) if case.cumulative else MOMENTUM
        running = oracle.running(running, whole.mean, whole.var, factor, momentum)
        gradients = whole.dx[rank], whole.dweight / size, whole.dbias / size
        arrays |= _named(step, whole.y[rank], *gradients, *running)
    arrays[f"{step}/eval"] = oracle.normalize(
        xs[rank], *running, *case.parameters(), eps=EPS, mask=masks[rank]
    )
    return arrays


def _named(step: int, *arrays: Array) -> Arrays:
    return {f"{step}/{name}": a for name, a in zip(QUANTITIES, arrays, strict=True)}


def compare(surface: str, case: Case, got: Arrays, rank: int, size: int) -> list[Error]:
    """The errors of what `train` has given on this rank."""
    errors = []
    for key, array in expected(case, rank, size).items():
        quantity = key.rpartition("/")[2]
        error, bound = oracle.relative_error(got[key], array), case.bound(quantity)
        errors.append(Error(error / bound, error, bound, quantity, case.name, surface))
    return errors


def models(communicator: Communicator, function: str) -> list[Error]:
    """The errors of a pair of the user's models, which "module:function" returns. Collective.

    Each rank has a part of the example input, and batch normalization is synchronized; alone, the
    models get the whole input. Where options of layers differ, these are the errors.
    """
    torch_model, chainer_model, x, unlike = pair(function)
    if unlike:
        return unlike
    alone = _steps(torch_model, chainer_model, x)
    torch_model, chainer_model, *_ = pair(function, communicator)
    indices = np.array_split(np.arange(len(x)), communicator.size)[communicator.rank]
    shared = _steps(torch_model, chainer_model, x[indices])
    errors = []
    for name, bound in OF_MODELS[x.dtype.name].items():
        torchs, chainers = (arrays[name] for arrays in alone)
        of_torch, of_chainer = (arrays[name] for arrays in shared)
        for case, got, right in (
            ("torch and chainer alone", torchs, chainers),
            ("torch and chainer on ranks", of_torch, of_chainer),
            ("torch alone and on ranks", of_torch, torchs[indices]),
            ("chainer alone and on ranks", of_chainer, chainers[indices]),
        ):
            error = oracle.relative_error(got, right, chainers)
            errors.append(Error(error / bound, error, bound, name, case, "models"))
    return errors


def _unlike(torch_model: Any, chainer_model: Any) -> Iterator[Error]:
    """An error for each pair of layers of one name whose options differ."""
    links = {path[1:].replace("/", "."): link for path, link in chainer_model.namedlinks()}
    for name, layer in torch_model.named_modules():
        link: Any = links.get(name)
        if not (hasattr(layer, "eps") and hasattr(link, "eps")):
            continue
        options: dict[str, list[Any]] = {"eps": [layer.eps, link.eps]}
        if hasattr(layer, "running_var") and hasattr(link, "avg_var"):
            options["momentum (1 - decay)"] = [layer.momentum, round(1 - link.decay, 12)]
            options["weight (gamma)"] = [layer.weight is not None, link.gamma is not None]
            options["bias (beta)"] = [layer.bias is not None, link.beta is not None]
            options["running_var (avg_var)"] = [
                getattr(layer, "running_var_convention", "unbiased_global"),
                getattr(link, "avg_var_convention", "unbiased_global"),
            ]
        for option, (torchs, chainers) in options.items():
            if torchs != chainers:
                text = f"{option} is {torchs} in torch, {chainers} in Chainer"
                yield Error(math.inf, math.inf, 0.0, option, name, "models", text)


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


def pair(
    path: str, communicator: Communicator | None = None
) -> tuple[Any, Any, Array, list[Error]]:
    """The user's models, their input, and the errors of their options.

    The batch normalizations share with nobody, or with the ranks of a communicator. Without
    errors, torch's model has the state of Chainer's. Raises ValueError for what is no pair.
    """
    function = find(path)  # makes Chainer importable
    import torch
    from chainer.serializers import DictionarySerializer

    from multibn import checkpoint
    from multibn.chainer_backend import create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    # All calls must return models with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    try:
        found = function()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{path} has raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        ) from error
    torch_model, chainer_model, x = _checked(path, found)
    is_shared = _set_ranks(path, torch_model, chainer_model, SingleProcess())
    for framework, surface in (("torch", Torch(torch_model)), ("Chainer", Chainer(chainer_model))):
        try:
            shape = surface.evaluate(x).shape  # links that wait for an input get their size
        except Exception as error:
            raise ValueError(
                f"the {framework} model of {path} must take the example input, {x.dtype} of shape "
                f"{x.shape}, and return an array: got {type(error).__name__}: {error}"
            ) from error
        if shape[:1] != x.shape[:1]:
            raise ValueError(
                f"the {framework} model of {path} must return an entry for each of {len(x)} "
                f"samples: got shape {shape}. Return the output, not a loss."
            )
    if unlike := list(_unlike(torch_model, chainer_model)):
        return torch_model, chainer_model, x, unlike
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
    if communicator is not None:
        _set_ranks(path, torch_model, chainer_model, communicator)
        torch_model = convert_sync_batchnorm(torch_model, communicator)
        if not is_shared:
            chainer_model = create_mnbn_model(chainer_model, communicator)
    return torch_model, chainer_model, x, []


def _checked(path: str, found: Any) -> tuple[Any, Any, Array]:
    """What the user's function has returned, if that is a pair and an example input."""
    import chainer
    from chainer import links as L
    from torch import nn

    each = found if isinstance(found, tuple) else (found,)
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
    if x.dtype.name not in OF_MODELS:
        raise ValueError(f"the example input must be float32 or float64: got {x.dtype} of {path}.")
    if len(x) < 3:  # two become 1 and -1, and dx is 0
        raise ValueError(f"the example input must have 3 or more samples: got {len(x)} of {path}.")
    return torch_model, chainer_model, x


def _set_ranks(path: str, torch_model: Any, chainer_model: Any, ranks: Communicator) -> bool:
    """Give the layers of multibn's these ranks; whether a model of Chainer's has such links only.

    Other layers that share cannot be given any.
    """
    from multibn.chainer_backend import MultiNodeBatchNormalization
    from multibn.torch_backend import SyncBatchNorm

    # isort: split
    from chainer import links as L
    from torch import nn

    links = list(chainer_model.links())
    for layer in (*torch_model.modules(), *links):
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = ranks
        elif isinstance(layer, MultiNodeBatchNormalization):
            layer.comm = ranks
        elif isinstance(layer, nn.SyncBatchNorm) or "MultiNode" in type(layer).__name__:
            kind = f"{type(layer).__module__.partition('.')[0]}'s {type(layer).__qualname__}"
            raise ValueError(
                f"the models of {path} must have the layers of one process, nn.BatchNorm2d and "
                f"L.BatchNormalization for example, which the comparison converts: got {kind}."
            )
    has = [any(isinstance(v, kind) for v in links)
           for kind in (MultiNodeBatchNormalization, L.BatchNormalization)]  # fmt: skip
    return has == [True, False]


def _steps(torch_model: Any, chainer_model: Any, x: Array) -> list[Arrays]:
    """A step of training and an evaluation of each model."""
    surfaces: tuple[Any, ...] = Torch(torch_model), Chainer(chainer_model)
    return [
        dict(zip(("y", "dx", "eval"), (*surface.train(x), surface.evaluate(x)), strict=True))
        for surface in surfaces
    ]
