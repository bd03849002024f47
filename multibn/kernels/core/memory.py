"""New arrays and copies of NumPy and of torch, for the C core, which finds out where arrays lie."""

import os
import sys
from functools import lru_cache, partial
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


class Library:
    """New arrays and copies, of NumPy or of torch."""

    def __init__(
        self, empty_like: Any, contiguous: Any, strides: Any, numbers: Any, changed: Any
    ) -> None:
        self.empty_like, self.contiguous, self.strides = empty_like, contiguous, strides
        self.numbers = numbers  # memory for float64 numbers of a shape
        self.changed = changed  # called when the core has written to running statistics
        self._templates = lru_cache(maxsize=1024)(
            lambda shape, axis: [numbers(n) for n in (channels(shape, axis), ())]
        )

    def statistics(self, x: Array, axis: tuple[int, ...]) -> BatchStatistics:
        """Memory for the statistics of a batch."""
        per_channel, number = self._templates(x.shape, axis)
        new = self.empty_like  # in half of the time of torch.empty
        return BatchStatistics(new(per_channel), new(per_channel), new(number), new(number))


def _of_torch(torch: Any) -> Library:
    def changed(*arrays: Array | None) -> None:
        torch._C._increment_version(arrays if arrays[-1] is not None else arrays[:-1])

    # The default device may be a GPU.
    numbers = partial(torch.empty, dtype=torch.float64, device="cpu")
    return Library(torch.empty_like, torch.Tensor.contiguous, torch.Tensor.stride, numbers, changed)


class _Libraries(dict[type, Library]):
    """The `Library` for a type of arrays; that of torch once torch is there."""

    def __missing__(self, kind: type) -> Library:
        torch = sys.modules.get("torch")
        if torch is None or not issubclass(kind, torch.Tensor):
            return self[np.ndarray]
        if torch.Tensor not in self:
            self[torch.Tensor] = self[torch.nn.Parameter] = _of_torch(torch)
            exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
            _core.use_arrays(np.ndarray, torch.Tensor, torch.nn.Parameter, exchange, num_threads)
        return self[torch.Tensor]


_NUMPY = Library(
    np.empty_like, np.ascontiguousarray, attrgetter("strides"), np.empty, lambda *arrays: None
)
LIBRARIES = _Libraries({np.ndarray: _NUMPY})
_core.use_arrays(np.ndarray, None, None, None, num_threads)
