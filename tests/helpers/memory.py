"""The memory of a training step: tensors that autograd saves, and the peak."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(NamedTuple):
    """Bytes of storages, each counted once, without parameters and their gradients."""

    saved: int  # for the backward pass, the input included
    peak: int  # the most that tensors made in the step hold at any time


@contextlib.contextmanager
def count_saved(parameters: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves in the context, without `parameters`."""
    own = {p.untyped_storage()._cdata for p in parameters}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def measure_memory(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Memory:
    """Run one training step, forward by `loss`, and count its bytes."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    with _Storages() as storages:
        with count_saved(parameters) as saved:
            value = loss()
        value.backward()
    peak = storages.peak(without=[p.grad for p in parameters if p.grad is not None])
    for parameter in parameters:
        parameter.grad = None
    return Memory(sum(saved.values()), peak)


class _Storages(TorchDispatchMode):
    """Notes when an operator first returns a storage, and when the storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}  # address -> number of the storage
        self._changes: list[tuple[int, int]] = []  # number of the storage, and +bytes or -bytes

    def peak(self, without: Iterable[Tensor]) -> int:
        apart = {self._alive.get(t.untyped_storage()._cdata) for t in without}
        counted = (size for number, size in self._changes if number not in apart)
        return max(accumulate(counted), default=0)

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = f(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in inputs:
                self._note(t.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return
        number = self._alive[address] = len(self._changes)
        self._changes.append((number, size))
        weakref.finalize(storage, self._gone, address, number, size)

    def _gone(self, address: int, number: int, size: int) -> None:
        del self._alive[address]
        self._changes.append((number, -size))
