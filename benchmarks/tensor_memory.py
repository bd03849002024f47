"""Memory of a training step: tensors that autograd saves, and the peak."""

import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(NamedTuple):
    """Bytes of one training step beside parameters and their gradients.

    Attributes
    ----------
    saved
        Tensors that autograd saves in the forward pass for the backward pass, the input included.
    peak
        The most bytes that tensors created in the step hold at any time.
    """

    saved: int
    peak: int


def measure_memory(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Memory:
    """Run one training step and count its bytes, on any device.

    Counts the storage of tensors, each once, but not what their allocator adds to round up, nor
    temporary memory inside of kernels.

    Parameters
    ----------
    loss
        The forward pass; returns the scalar to differentiate. Called once: batch norms count one
        batch, and the call is collective if they are.
    parameters
        Tensors that are not counted, and whose gradients are not. Sets their gradients to None.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    own = {p.untyped_storage().data_ptr() for p in parameters}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with _Storages() as storages:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
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
        """Most bytes at any time, not counting the storages of the tensors `without`."""
        apart = {self._alive.get(t.untyped_storage()._cdata) for t in without}
        counted = (size for number, size in self._changes if number not in apart)
        return max(accumulate(counted), default=0)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
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
