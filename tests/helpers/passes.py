"""The parts of a pass, by the verbs of a kernels file: for tests that look at one part alone."""

import math
from typing import Any, NamedTuple

import numpy as np

from multibn._arrays import array_namespace
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
        if self.kernels is generic:
            return generic.local_moments(x, axis=axis)
        from multibn.kernels import _core
        from multibn.kernels._memory import LIBRARIES, channels

        taken = _core.fits(x, axis, None, None, None)
        dense = x if taken else LIBRARIES[type(x)].dense_copy(x, x)
        mean, var = (np.empty(channels(x.shape, axis)) for _ in range(2))
        written = mean.ctypes.data, var.ctypes.data
        sizes = _core.begin_forward(dense, axis, None, None, 0.0, 0.0, None)
        if sizes is None:
            return generic.local_moments(x, axis=axis)
        parts = self.kernels.sum_tasks(sizes, 1)[0][0] if sizes else 1
        _core.begin_forward(dense, axis, None, None, 0.0, 0.0, (parts, 0, *written, 0))
        xp = array_namespace(x)
        return xp.asarray(mean), xp.asarray(var)

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
