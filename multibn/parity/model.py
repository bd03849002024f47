"""A user's own pair of models, with one set of weights: `multibn parity --model module:function`.

The function takes no arguments and returns a torch model, the Chainer model with the same layers
and names, and an example input: a NumPy array `(N, ...)` with N of 2 or more. It must return the
same on every call; torch's and NumPy's global random generators are seeded before. The models
return one array with an entry per sample, and have nothing random (dropout) in them.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from multibn._launch import LAUNCHERS, WorkerError, Written
from multibn.communicators import Communicator
from multibn.parity import compare
from multibn.parity.cases import NDArrayAny
from multibn.parity.compare import Outcome, Row
from multibn.parity.job import Job

# Rounding grows with depth: these are for models, not layers.
BOUNDS = {
    "float32": {"y": 1e-4, "dx": 1e-3, "eval": 1e-4},
    "float64": {"y": 1e-10, "dx": 1e-9, "eval": 1e-10},
}
FRAMEWORKS = ("torch", "chainer")
SIZES = (1, 2)

Arrays = dict[str, NDArrayAny]


def train(spec: str, communicator: Communicator) -> tuple[Arrays, dict[str, Any]]:
    """One training step and an evaluation of both models, in a worker.

    Collective over `communicator`: each rank has its part of the example input, and if there are
    several, batch normalization is synchronized. Raises TypeError or ValueError if `spec` does not
    name a function, or what the function returns does not fit.
    """
    from multibn.chainer_backend import create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    torch_model, chainer_model, x = load(spec)
    carry_over(chainer_model, torch_model)
    notes = differing_settings(torch_model, chainer_model)
    if communicator.size > 1:
        torch_model = convert_sync_batchnorm(torch_model, communicator)
        chainer_model = create_mnbn_model(chainer_model, communicator)
    arrays = {
        f"{framework}/{name}": a
        for framework, step, model in (
            ("torch", _torch_step, torch_model),
            ("chainer", _chainer_step, chainer_model),
        )
        for name, a in step(model, x, communicator).items()
    }
    return arrays, {"notes": notes}


def load(spec: str) -> tuple[Any, Any, NDArrayAny]:
    """What the function `spec` returns: a torch model, a Chainer model and an input."""
    import torch

    module, _, name = spec.partition(":")
    function = getattr(importlib.import_module(module), name, None) if name else None
    if not callable(function):
        raise ValueError(
            f"`--model` must be MODULE:FUNCTION, a function that can be imported: got {spec!r}. "
            "Write a function that returns a torch model, a Chainer model and an input."
        )
    # Ranks and runs must begin with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    result = function()
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], np.ndarray):
        raise TypeError(
            f"{spec} must return a torch model, a Chainer model and a NumPy array: got {result!r}."
        )
    x = result[2]
    if x.ndim < 1 or len(x) < max(SIZES) or x.dtype.name not in BOUNDS:
        raise ValueError(
            f"{spec} must return an input of float32 or float64 with {max(SIZES)} or more samples: "
            f"got {x.dtype} of shape {x.shape}."
        )
    return result


def carry_over(chainer_model: Any, torch_model: Any) -> None:
    """Give the torch model the weights and running statistics of the Chainer model."""
    import torch
    from chainer.serializers import DictionarySerializer

    from multibn import checkpoint

    serializer = DictionarySerializer()
    serializer.save(chainer_model)
    state = checkpoint.chainer_to_torch(serializer.target).state
    torch_model.load_state_dict({name: torch.tensor(a) for name, a in state.items()})


def differing_settings(torch_model: Any, chainer_model: Any) -> list[str]:
    """Sentences on settings of batch normalization that no checkpoint carries over."""
    layers = [m for m in torch_model.modules() if hasattr(m, "running_mean")]
    links = [link for link in chainer_model.links() if hasattr(link, "avg_mean")]
    notes = []
    for name, of_torch, of_chainer in (
        ("eps", {m.eps for m in layers}, {link.eps for link in links}),
        ("momentum", {m.momentum for m in layers}, {round(1 - k.decay, 12) for k in links}),
    ):
        if of_torch != of_chainer:
            notes.append(
                f"{name} of batch normalization should be equal: torch has {sorted(of_torch)}, "
                f"Chainer {sorted(of_chainer)}. Set it where the models are made "
                "(momentum is 1 - decay)."
            )
    return notes


def run(spec: str, communicator: str, *, timeout: float) -> tuple[list[Row], list[str]]:
    """Launch the models on one process, and on two ranks over `communicator`.

    Returns rows for the report, the frameworks against each other and two ranks against one
    process, and notes, sentences to print.
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
            for framework in FRAMEWORKS:
                row = Row(framework, name, size)
                row.outcomes["one process"] = _compare(written, framework, alone, framework)
                rows.append(row)
    return rows, notes


def _compare(
    ranks: Sequence[Written], framework: str, others: Sequence[Written], other: str
) -> Outcome:
    got, expected = _whole(ranks, framework), _whole(others, other)
    bounds = BOUNDS[expected["y"].dtype.name]
    errors = {
        name: compare.relative_error(got[name], expected[name], expected[name]) for name in bounds
    }
    return Outcome(bounds, errors)


def _whole(ranks: Sequence[Written], framework: str) -> Arrays:
    """The arrays of all samples, from those of each rank's."""
    return {
        name: np.concatenate([written.arrays[f"{framework}/{name}"] for written in ranks])
        for name in ("y", "dx", "eval")
    }


def _part(a: NDArrayAny, communicator: Communicator) -> NDArrayAny:
    return np.ascontiguousarray(np.array_split(a, communicator.size)[communicator.rank])


def _output_gradient(y: Any, x: NDArrayAny, communicator: Communicator) -> NDArrayAny:
    """This rank's part of a gradient that is the same for any number of ranks."""
    if not hasattr(y, "shape") or y.shape[:1] != _part(x, communicator).shape[:1]:
        raise TypeError(
            "the models must return one array with an entry per sample: got "
            f"{getattr(y, 'shape', type(y).__qualname__)} for an input of shape "
            f"{_part(x, communicator).shape}. Wrap them in one that does."
        )
    dy = np.random.default_rng(0).normal(size=(len(x), *y.shape[1:])).astype(x.dtype)
    return _part(dy, communicator)


def _torch_step(model: Any, x: NDArrayAny, communicator: Communicator) -> Arrays:
    import torch

    t = torch.tensor(_part(x, communicator), requires_grad=True)
    y = model.train()(t)
    y.backward(torch.from_numpy(_output_gradient(y, x, communicator)))
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
