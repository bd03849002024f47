"""New arrays and copies of NumPy and of torch, for the C core, which finds out where arrays lie."""

import os
import sys
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from multibn._typing import Array
from multibn.kernels.arguments import BatchStatistics
from multibn.kernels.core import _core
from multibn.kernels.layout import channels


def num_threads() -> int:
    """Threads to use for a large array: as many as torch's, or OMP_NUM_THREADS without torch."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(int(asked), 1) if asked.isdigit() else os.cpu_count() or 1


class NumPy:
    """New arrays and copies of NumPy."""

    empty_like, contiguous = staticmethod(np.empty_like), staticmethod(np.ascontiguousarray)
    strides = staticmethod(attrgetter("strides"))

    def numbers(self, shape: Any) -> Array:
        """Memory for so many float64 numbers."""
        return np.empty(shape)

    def statistics(self, x: Array, axis: tuple[int, ...]) -> BatchStatistics:
        """Memory for the statistics of a batch."""
        shape = channels(x.shape, axis)
        return BatchStatistics(np.empty(shape), np.empty(shape), np.empty(()), np.empty(()))

    def changed(self, *arrays: Array | None) -> None:
        """The core has written to arrays of the user's."""


class Torch:
    """The same of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.empty_like, self.contiguous = torch.empty_like, torch.Tensor.contiguous
        self.strides = torch.Tensor.stride
        self._increment_version = torch._C._increment_version
        self._templates = lru_cache(maxsize=1024)(
            lambda shape, axis: [self.numbers(n) for n in (channels(shape, axis), ())]
        )

    def numbers(self, shape: Any) -> Array:
        # The default device may be a GPU.
        return self._torch.empty(shape, dtype=self._torch.float64, device="cpu")

    def statistics(self, x: Array, axis: tuple[int, ...]) -> BatchStatistics:
        per_channel, number = self._templates(x.shape, axis)
        new = self.empty_like  # in half of the time of torch.empty
        return BatchStatistics(new(per_channel), new(per_channel), new(number), new(number))

    def changed(self, *arrays: Array | None) -> None:
        if arrays[-1] is None:
            arrays = arrays[:-1]
        self._increment_version(arrays)


class _Libraries(dict[type, Any]):
    """The `NumPy` or `Torch` object for a type of arrays; `Torch` once torch is there."""

    def __missing__(self, kind: type) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not issubclass(kind, torch.Tensor):
            return self[np.ndarray]
        if torch.Tensor not in self:
            library = Torch(torch)
            self[torch.Tensor] = self[torch.nn.Parameter] = library
            exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
            _core.use_arrays(np.ndarray, torch.Tensor, torch.nn.Parameter, exchange, num_threads)
        return self[torch.Tensor]


LIBRARIES = _Libraries({np.ndarray: NumPy()})
_core.use_arrays(np.ndarray, None, None, None, num_threads)
