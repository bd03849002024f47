"""A user's own pair of models, with one set of weights: `multibn parity --model module:function`.

The function takes no arguments and returns a torch model, the Chainer model with the same layers
and names, and an example input: a NumPy array `(N, ...)` with N of 2 or more. It must return the
same on every call; torch's and NumPy's global random generators are seeded before. The models
must return one array with an entry per sample, and draw no random numbers (dropout).
"""

import importlib
from typing import Any

import numpy as np

from multibn.communicators import Communicator
from multibn.parity.compare import Arrays
from multibn.parity.oracle import Array


def train(spec: str, communicator: Communicator) -> tuple[Arrays, dict[str, Any]]:
    """One training step and an evaluation of both models, in a worker.

    Collective over `communicator`: each of several ranks has its part of the example input, and
    batch normalization is synchronized. Raises TypeError or ValueError as `load`.
    """
    from multibn.chainer_backend import create_mnbn_model
    from multibn.torch_backend import convert_sync_batchnorm

    torch_model, chainer_model, x = load(spec)
    notes = carry_over(chainer_model, torch_model)
    if communicator.size > 1:
        torch_model = convert_sync_batchnorm(torch_model, communicator)
        chainer_model = create_mnbn_model(chainer_model, communicator)
    part = np.ascontiguousarray(np.array_split(x, communicator.size)[communicator.rank])
    return _torch_step(torch_model, part) | _chainer_step(chainer_model, part), {"notes": notes}


def load(spec: str) -> tuple[Any, Any, Array]:
    """Call the function `spec`; returns a torch model, a Chainer model and an input.

    TypeError or ValueError for models that cannot be compared.
    """
    import multibn.chainer_backend  # noqa: F401 (makes Chainer importable)

    # isort: split
    import chainer
    import torch

    module, _, name = spec.partition(":")
    function = getattr(importlib.import_module(module), name)
    # All ranks and runs must start with the same weights.
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers use this one)
    result = function()
    results = result if isinstance(result, tuple) else (result,)
    kinds = torch.nn.Module, chainer.Link, np.ndarray
    if len(results) != 3 or not all(map(isinstance, results, kinds)):
        names = ", ".join(type(v).__qualname__ for v in results)
        raise TypeError(
            f"{spec} must return a torch model, a Chainer model and a NumPy array: got {names}."
        )
    x = results[2]
    if x.ndim < 1 or len(x) < 2 or x.dtype.name not in ("float32", "float64"):
        raise ValueError(
            f"{spec} must return an input of float32 or float64 with 2 or more samples: "
            f"got {x.dtype} of shape {x.shape}."
        )
    return results


def carry_over(chainer_model: Any, torch_model: Any) -> tuple[str, ...]:
    """Give the torch model the weights and running statistics of the Chainer model.

    Returns sentences on what is not carried over, eps and momentum. Raises ValueError if the models
    have other layers, or layers of other shapes.
    """
    import torch
    from chainer.serializers import DictionarySerializer

    from multibn import checkpoint

    serializer = DictionarySerializer()
    serializer.save(chainer_model)
    state, notes = checkpoint.chainer_to_torch(serializer.target)
    try:
        torch_model.load_state_dict({name: torch.tensor(a) for name, a in state.items()})
    except RuntimeError as error:
        raise ValueError(
            "the two models must have the same layers under the same names: "
            f"{' '.join(str(error).split())} Rename or change the layers of one model."
        ) from error
    return notes


# A step down the sum of y**3 / 3: of the sum of y, or of y**2, batch normalization gives dx = 0.


def _torch_step(model: Any, x: Array) -> Arrays:
    import torch

    t = torch.tensor(x, requires_grad=True)
    y = model.train()(t)
    y.backward(y.detach() ** 2)
    with torch.no_grad():
        results = {"y": y, "dx": t.grad, "eval": model.eval()(t)}
    return {f"torch/{name}": np.asarray(a.detach()) for name, a in results.items()}


def _chainer_step(model: Any, x: Array) -> Arrays:
    import chainer

    v = chainer.Variable(x)
    y = model(v)
    y.grad = y.array**2
    y.backward()
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        evaluated = model(v)
    return {"chainer/y": y.array, "chainer/dx": v.grad, "chainer/eval": evaluated.array}
