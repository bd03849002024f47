"""The verbs of a kernels file with their arguments one by one, and the parts of a pass alone."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import pytest

from multibn.kernels import (
    RIGHT,
    BatchStatistics,
    Gradient,
    Input,
    Running,
    generic,
)
from multibn.kernels.layout import channels
from multibn.message import concat
from tests.helpers import require


class Unpacked(NamedTuple):
    mean: Any
    var: Any
    count: Any
    element_weight: Any
    state: int = RIGHT


class Verbs:
    """By the module `kernels`. The options are fields of `Input` or `Gradient`."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def begin_forward(
        self, x: Any, rank_weight: Any, count: Any, *, out: Any = None, **options: Any
    ) -> Any:
        return self.kernels.begin_forward(
            Input(x, None, None, 1.0, **options), rank_weight, count, out=out
        )

    def finish_forward(
        self, summed: Any, x: Any, weight: Any, bias: Any, *share: Any, **options: Any
    ) -> Any:
        """y, mean, var, count, element_weight and state."""
        i = Input(x, weight, bias, **options)
        y, batch, state = self.kernels.finish_forward(i, summed, *share)
        return y, *batch, state

    def begin_backward(self, *about: Any, out: Any = None, **options: Any) -> Any:
        return self.kernels.begin_backward(gradient(*about, **options), out=out)

    def finish_backward(self, summed: Any, *about: Any, begun: Any = (), **options: Any) -> Any:
        """`begun` is what `begin_backward` returned after the gradients of the parameters."""
        return self.kernels.finish_backward(gradient(*about, **options), summed, *begun)

    def normalize(self, x: Any, mean: Any, var: Any, weight: Any, bias: Any, **options: Any) -> Any:
        batch = BatchStatistics(mean, var, None, None)
        return self.kernels.normalize(Input(x, weight, bias, **options), batch)

    def local_moments(self, x: Any, *, axis: tuple[int, ...]) -> tuple[Any, Any]:
        """Mean and variance, as a message tells them."""
        if self.kernels is generic:
            return generic.local_moments(x, axis)
        mean, meansqr = generic.split_sums(
            self.begin_forward(x, 1.0, 1.0, axis=axis)[:-2], channels(x.shape, axis)
        )
        return mean, meansqr - mean * mean

    def backward_sums(
        self, dy: Any, x: Any, mean: Any, var: Any, *, eps: float, axis: tuple[int, ...]
    ) -> Any:
        payload, dweight, dbias, *_ = self.begin_backward(
            dy, x, mean, var, None, None, eps=eps, axis=axis
        )
        assert dweight is None
        assert dbias is None
        return generic.split_sums(payload, mean.shape)

    def input_gradient(
        self, dy: Any, x: Any, mean: Any, var: Any, weight: Any, element_weight: Any,
        sum_dy: Any, sum_dy_xhat: Any, *, eps: float, axis: tuple[int, ...],
    ) -> Any:  # fmt: skip
        summed = concat([sum_dy, sum_dy_xhat])
        statistics = mean, var, weight, None, element_weight
        dx, dresidual = self.finish_backward(summed, dy, x, *statistics, eps=eps, axis=axis)
        assert dresidual is None
        return dx

    def unpack(self, summed: Any, shape: tuple[int, ...], weight: float, count: float) -> Unpacked:
        x: Any = np.zeros((1, *shape), "float32")
        if not isinstance(summed, np.ndarray):
            import torch

            x = torch.from_numpy(x)
        share = weight, count
        _, *found = self.finish_forward(summed, x, None, None, *share, eps=1.0, axis=(0,))
        return Unpacked(*found)

    def move(self, running: Running, mean: Any, var: Any, count: float, local_count: float) -> None:
        """By a message of weight 1."""
        C = math.prod(mean.shape)
        summed = np.r_[np.ravel(mean), np.ravel(var + mean * mean), 1.0, count]
        x: Any = np.zeros((1, C), "float32")
        if not isinstance(running.mean, np.ndarray):
            import torch

            x, summed = torch.from_numpy(x), torch.from_numpy(summed)
        options: Any = {"eps": 1.0, "axis": (0,), "running": running}
        *_, state = self.finish_forward(summed, x, None, None, 1.0, local_count, **options)
        assert state == RIGHT


def gradient(
    dy: Any, x: Any, mean: Any, var: Any, weight: Any, bias: Any,
    element_weight: Any = None, **options: Any,
) -> Gradient:  # fmt: skip
    batch = BatchStatistics(mean, var, None, element_weight)
    of_gradient = {name: options.pop(name) for name in ("y", "needs_dx") if name in options}
    return Gradient(dy, Input(x, weight, bias, **options), batch, **of_gradient)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """As torch or OMP_NUM_THREADS set them."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else os.environ.get("OMP_NUM_THREADS", "")

    def use(n: Any) -> None:
        if torch:
            torch.set_num_threads(n)
        else:
            os.environ["OMP_NUM_THREADS"] = str(n)

    use(n)
    try:
        yield
    finally:
        use(before)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the generic kernels were used")


VERBS = "begin_forward", "finish_forward", "begin_backward", "finish_backward", "normalize", "move"


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference raises."""
    for name in VERBS:
        monkeypatch.setattr(generic, name, refuse)


def as_numpy(v: Any) -> Any:
    return v


def as_torch(v: Any) -> Any:
    """The same memory as a tensor; None stays."""
    require.need("torch")
    import torch

    return None if v is None else torch.from_numpy(np.asarray(v))


libraries = pytest.mark.parametrize("of", [as_numpy, as_torch], ids=["numpy", "torch"])


def takes_int_of_an_array() -> bool:
    """As Triton 3.6 does, and 3.9 does no more; NumPy 2.5 refuses this."""
    if not require.available("triton"):
        return False
    triton = tuple(int(n) for n in metadata.version("triton").split(".")[:2])
    return triton < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.5.0"


def patch_the_interpreter_once() -> None:
    """Let Triton's interpreter patch its language at each launch, and not at each inner call.

    The launch has patched the language for all functions of its own module, and patches of Triton's
    library stay. To look for what is to be patched takes longer than most functions.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
