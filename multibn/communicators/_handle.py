"""What all communicators have in common."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from multibn._typing import Array

_T = TypeVar("_T", bound="Handle")


class Handle:
    """Names processes without owning them: copies are the same handle, pickles find it again."""

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: dict[int, Any]) -> _T:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Forwarding(Handle, ABC):
    """Stands for another communicator, which is looked up at each use."""

    @property
    def rank(self) -> int:
        return int(self._find().rank)

    @property
    def size(self) -> int:
        return int(self._find().size)

    def allreduce(self, x: Array, /) -> Array:
        return self._find().allreduce(x)

    def split(self, color: int, key: int = 0) -> Any:
        return self._find().split(color, key)

    @abstractmethod
    def _find(self) -> Any:
        """The communicator that this one stands for."""
