"""The parts of a pass, by the verbs of a kernels file: for tests that look at one part alone."""

import math
from typing import Any, NamedTuple

import numpy as np

from multibn.kernels import RIGHT, Running, generic
from multibn.message import concat


class Unpacked(NamedTuple):
    mean: Any
    var: Any
    count: Any
    element_weight: Any
    state: int = RIGHT


class Passes:
    """By the module `kernels`."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.begin_forward = kernels.begin_forward
        self.normalize = kernels.normalize

    def local_moments(self, x: Any, *, axis: tuple[int, ...]) -> tuple[Any, Any]:
        """Mean and variance, with the digits that a message would take from the variance."""
        o = None if self.kernels is generic else self.kernels._operands(axis, (x, None), None)
        if o is None:
            return generic.local_moments(x, axis=axis)
        from multibn.kernels import _core

        library, plan, (x_at, *_), _, _alive = o
        moments, addresses = library.new(library.float64, plan.shape, plan.shape)
        parts = self.kernels.sum_tasks(plan.sizes, 1)[0][0]
        _core.begin_forward(plan.dtype, x_at, 0, *plan.sizes, parts, 0, *addresses, 0, 0, 0.0, 0.0)
        return tuple(moments)

    def backward_sums(
        self, dy: Any, x: Any, mean: Any, var: Any, *, eps: float, axis: tuple[int, ...]
    ) -> Any:
        payload, dweight, dbias = self.kernels.begin_backward(
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
        dx, dresidual = self.kernels.finish_backward(summed, dy, x, *statistics, eps=eps, axis=axis)
        assert dresidual is None
        return dx

    def unpack(self, summed: Any, shape: tuple[int, ...], weight: float, count: float) -> Unpacked:
        x: Any = np.zeros((1, *shape), "float32")
        if not isinstance(summed, np.ndarray):
            import torch

            x = torch.from_numpy(x)
        _, *found = self.kernels.finish_forward(
            summed, x, None, None, weight, count, eps=1.0, axis=(0,)
        )
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
        *_, state = self.kernels.finish_forward(summed, x, None, None, 1.0, local_count, **options)
        assert state == RIGHT
