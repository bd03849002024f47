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


class Watched(Handle, ABC):
    """A communicator that waits for the other ranks with a deadline.

    Its messages travel in channels, which keep those apart that must not be taken for each other:
    a message of one channel never meets one of another.

    Attributes
    ----------
    timeout
        Seconds that a collective may take.
    """

    timeout: float

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def split(self, color: int, key: int = 0) -> Any: ...

    def allreduce(self, x: Array, /) -> Array:
        text = f"a sum of {x.dtype} numbers of shape {tuple(x.shape)}"
        return self.allreduce_in(x, channel=0, place=text, text=text)

    @abstractmethod
    def allreduce_in(self, x: Array, /, *, channel: int, place: str, text: object) -> Array:
        """As `allreduce`. A channel is opened at its first use, by all ranks at the same time.

        Channel 0 is for anything; in a channel above that all messages have as many numbers as it
        says, of one dtype. `place` is equal on ranks that are to meet, `text` describes it: what it
        says is asked for when somebody is to read it.
        """

    @property
    @abstractmethod
    def agreements(self) -> dict[Any, Any]:
        """What the ranks have found out to be equal, kept for all handles of these processes."""


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

    def resolve(self) -> Any:
        """The communicator that this one stands for at the moment."""
        found = self._find()
        return found.resolve() if isinstance(found, Forwarding) else found

    @abstractmethod
    def _find(self) -> Any:
        """The communicator that this one stands for."""
