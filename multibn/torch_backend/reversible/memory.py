"""What a training step takes in memory: what autograd keeps, and the peak."""

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
        What autograd keeps from the forward pass to the backward pass, the input included.
    peak
        The most that tensors made in the step hold at any time.
    """

    saved: int
    peak: int


def measure_memory(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Memory:
    """Run one training step and count its bytes, on any device.

    Tensors are counted, each storage once, and not what their allocator rounds up or what kernels
    borrow inside.

    Parameters
    ----------
    loss
        The forward pass; returns the scalar to differentiate. Called once, so batch norms count
        one batch, and it is collective where they are.
    parameters
        What is not counted, nor its gradients, which are None before and after.
    """
    parameters = list(parameters)
    _forget_gradients(parameters)
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
    _forget_gradients(parameters)
    return Memory(sum(saved.values()), peak)


def _forget_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Storages(TorchDispatchMode):
    """Notes when each storage that an operator returns first is seen, and when it goes."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}  # by address, the number of the storage that is there
        self._changes: list[tuple[int, int]] = []  # number of the storage, and its bytes or less

    def peak(self, without: Iterable[Tensor]) -> int:
        """Most bytes at any time, not counting the storages of some that are alive."""
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
