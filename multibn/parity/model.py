"""A user's own pair of models, with one set of weights: `multibn parity --model module:function`.

The function takes no arguments and returns a torch model, the Chainer model with the same layers
and names, and an example input: a NumPy array `(N, ...)` with N of 2 or more. It must return the
same on every call; torch's and NumPy's global random generators are seeded before. The models
must return one array with an entry per sample, and draw no random numbers (dropout).
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from multibn._environment import ask, nearest
from multibn._launch import LAUNCHERS, WorkerError, Written
from multibn.communicators import Communicator
from multibn.parity import compare
from multibn.parity.cases import NDArrayAny
from multibn.parity.compare import Outcome, Row
from multibn.parity.job import Job

# Wider than the bounds of single layers: rounding errors grow with depth.
BOUNDS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}
SIZES = (1, 2)

Arrays = dict[str, NDArrayAny]


def train(spec: str, communicator: Communicator) -> tuple[Arrays, dict[str, Any]]:
    """One training step and an evaluation of both models, in a worker.

    Collective over `communicator`: each of several ranks has its part of the example input, and
    batch normalization is synchronized. Raises TypeError or ValueError as `load`.
    """
    from multibn.chainer_backend import create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    torch_model, chainer_model, x = load(spec)
    carry_over(chainer_model, torch_model)
    notes = differing_settings(torch_model, chainer_model)
    if communicator.size > 1:
        torch_model = convert_sync_batchnorm(torch_model, communicator)
        chainer_model = create_mnbn_model(chainer_model, communicator)
    torch_arrays = _torch_step(torch_model, x, communicator)
    chainer_arrays = _chainer_step(chainer_model, x, communicator)
    arrays = {f"torch/{name}": a for name, a in torch_arrays.items()}
    return arrays | {f"chainer/{name}": a for name, a in chainer_arrays.items()}, {"notes": notes}


def load(spec: str) -> tuple[Any, Any, NDArrayAny]:
    """Call the function `spec`; returns a torch model, a Chainer model and an input.

    RuntimeError if the function raises; TypeError or ValueError for what cannot be compared.
    """
    import chainer
    import torch

    function = _function(spec)
    # All ranks and runs must start with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    try:
        result = function()
    except Exception as error:
        raise RuntimeError(_raised(spec, error)) from error
    kinds = torch.nn.Module, chainer.Link, np.ndarray
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != 3 or not all(map(isinstance, results, kinds)):
        names = ", ".join(type(v).__qualname__ for v in results)
        raise TypeError(
            f"{spec} must return a torch model, a Chainer model and a NumPy array: got {names}."
        )
    x = results[2]
    if x.ndim < 1 or len(x) < max(SIZES) or x.dtype.name not in BOUNDS:
        raise ValueError(
            f"{spec} must return an input of float32 or float64 with {max(SIZES)} or more samples: "
            f"got {x.dtype} of shape {x.shape}."
        )
    return results


def complaint(spec: str, timeout: float) -> str:
    """Why the models of `spec` cannot be compared, in a sentence; "" if nothing is known.

    Another process imports the user's module, which may initialise MPI.
    """
    call = f"json.dumps(model.why_not({spec!r}))"
    said = ask(f"import json; from multibn.parity import model; print({call})", timeout=timeout)
    return said if isinstance(said, str) else f"`--model` {spec}: {said['error']}"


def why_not(spec: str) -> str:
    """As `complaint`, in this process."""
    import multibn.chainer_backend  # noqa: F401 (makes Chainer importable)

    try:
        torch_model, chainer_model, x = load(spec)
        carry_over(chainer_model, torch_model)
        check_dtypes(chainer_model, torch_model, x)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    except Exception as error:  # of the user's module, when imported
        return _raised(spec, error)
    return ""


def _raised(spec: str, error: Exception) -> str:
    module, _, name = spec.partition(":")
    return (
        f"`--model` {spec} raised {type(error).__name__}: {error}. To see where, run "
        f"python -c 'import {module}; {module}.{name}()'"
    )


def _function(spec: str) -> Any:
    """The function MODULE:FUNCTION; ValueError with the nearest names if there is none."""
    name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not f"{name}.".startswith(f"{missing}."):
            raise  # the user's module exists, and imports another one that does not
        parent, dot, _ = missing.rpartition(".")
        path = sys.modules[parent].__path__ if parent else None
        near = nearest(missing, [parent + dot + m.name for m in pkgutil.iter_modules(path)])
        raise ValueError(
            f"`--model` must name a module that can be imported in {os.getcwd()}: got "
            f"{missing!r}{near}. Correct the name, or go to the folder of the module."
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise ValueError(
            f"`--model` must name a function of {name}: got {attribute!r}"
            f"{nearest(attribute, names)}. Write a function that returns a torch model, a Chainer "
            "model and an input."
        )
    return function


def carry_over(chainer_model: Any, torch_model: Any) -> None:
    """Give the torch model the weights and running statistics of the Chainer model.

    Raises ValueError if the models have other layers, or layers of other shapes.
    """
    import torch
    from chainer.serializers import DictionarySerializer

    from multibn import checkpoint

    serializer = DictionarySerializer()
    serializer.save(chainer_model)
    state = checkpoint.chainer_to_torch(serializer.target).state
    own = torch_model.state_dict()
    differences = [
        f"{names[:3]} {'are' if len(names) > 1 else 'is'} in {model} alone"
        for names, model in (
            (sorted(own.keys() - state.keys()), "the torch model"),
            (sorted(state.keys() - own.keys()), "the Chainer model"),
        )
        if names
    ] or [
        f"{name} has shape {tuple(own[name].shape)} in torch, {a.shape} in Chainer"
        for name, a in state.items()
        if tuple(own[name].shape) != a.shape
    ]
    if differences:
        raise ValueError(
            "the two models must have the same layers under the same names: "
            f"{'; '.join(differences[:3])}. Rename or change the layers of one model."
        )
    torch_model.load_state_dict({name: torch.tensor(a) for name, a in state.items()})


def check_dtypes(chainer_model: Any, torch_model: Any, x: NDArrayAny) -> None:
    """Raise TypeError for parameters of another dtype than the input."""
    for model, dtypes in (
        ("torch", {str(p.dtype).removeprefix("torch.") for p in torch_model.parameters()}),
        ("Chainer", {p.dtype.name for p in chainer_model.params()}),
    ):
        if dtypes - {x.dtype.name}:
            raise TypeError(
                f"the parameters must have the dtype of the example input, {x.dtype}: got "
                f"{' and '.join(sorted(dtypes))} in the {model} model. Cast one of them."
            )


def differing_settings(torch_model: Any, chainer_model: Any) -> list[str]:
    """Sentences on settings of batch normalization that no checkpoint carries over."""
    layers = [m for m in torch_model.modules() if hasattr(m, "running_mean")]
    links = [link for link in chainer_model.links() if hasattr(link, "avg_mean")]
    notes = []
    for name, torchs, chainers in (
        ("eps", {m.eps for m in layers}, {link.eps for link in links}),
        ("momentum", {m.momentum for m in layers}, {round(1 - k.decay, 12) for k in links}),
    ):
        if torchs != chainers:
            notes.append(
                f"{name} of batch normalization should be equal: torch has {sorted(torchs)}, "
                f"Chainer {sorted(chainers)}. Set it where the models are built "
                "(momentum is 1 - decay)."
            )
    return notes


def run(spec: str, communicator: str, *, timeout: float) -> tuple[list[Row], list[str]]:
    """Launch the models on one process, and on two ranks over `communicator`.

    Returns notes to print, and rows for the report: the frameworks against each other, and two
    ranks against one process.
    """
    over = [("single process", ""), (communicator, LAUNCHERS[communicator])]
    rows: list[Row] = []
    notes: list[str] = []
    alone: list[Written] = []
    for size, (name, launcher) in zip(SIZES, over, strict=True):
        both = Row("torch, chainer", name, size)
        rows.append(both)
        try:
            written = Job(launcher, size, (name,), model=spec).run(timeout=timeout)
        except WorkerError as error:
            notes.append(error.output)
            both.not_run, both.failed = error.reason, True
            continue
        notes += [n for n in written[0].notes["notes"] if n not in notes]
        both.outcomes["each other"] = _compare(written, "torch", written, "chainer")
        if size == 1:
            alone = written
        elif alone:
            for framework in ("torch", "chainer"):
                row = Row(framework, name, size)
                row.outcomes["one process"] = _compare(written, framework, alone, framework)
                rows.append(row)
    return rows, notes


def _compare(
    ranks: Sequence[Written], framework: str, others: Sequence[Written], other: str
) -> Outcome:
    errors = {}
    for name in ("y", "dx", "eval"):
        got = np.concatenate([rank.arrays[f"{framework}/{name}"] for rank in ranks])
        expected = np.concatenate([rank.arrays[f"{other}/{name}"] for rank in others])
        errors[name] = compare.relative_error(got, expected, expected)
    return Outcome(BOUNDS[expected.dtype.name], errors)


def _part(a: NDArrayAny, communicator: Communicator) -> NDArrayAny:
    return np.ascontiguousarray(np.array_split(a, communicator.size)[communicator.rank])


def _output_gradient(y: Any, x: NDArrayAny, communicator: Communicator) -> NDArrayAny:
    """This rank's part of a gradient that does not depend on the number of ranks."""
    if not hasattr(y, "shape") or y.shape[:1] != _part(x, communicator).shape[:1]:
        raise TypeError(
            "the models must return one array with an entry per sample: got "
            f"{getattr(y, 'shape', type(y).__qualname__)} for an input of shape "
            f"{_part(x, communicator).shape}. Wrap them in a model that does."
        )
    dy = np.random.default_rng(0).normal(size=(len(x), *y.shape[1:])).astype(x.dtype)
    return _part(dy, communicator)


def _torch_step(model: Any, x: NDArrayAny, communicator: Communicator) -> Arrays:
    import torch

    t = torch.tensor(_part(x, communicator), requires_grad=True)
    y = model.train()(t)
    dy = torch.from_numpy(_output_gradient(y, x, communicator))
    y.backward(dy)
    assert t.grad is not None
    with torch.no_grad():
        evaluated = model.eval()(t)
    return {"y": y.detach().numpy(), "dx": t.grad.numpy(), "eval": evaluated.numpy()}


def _chainer_step(model: Any, x: NDArrayAny, communicator: Communicator) -> Arrays:
    import chainer

    v = chainer.Variable(_part(x, communicator))
    y = model(v)
    y.grad = _output_gradient(y, x, communicator)
    y.backward()
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        evaluated = model(v)
    return {"y": y.array, "dx": v.grad, "eval": evaluated.array}
