"""A communicator that notes the size of every message."""

from math import prod
from typing import Any

from multibn._typing import Array
from multibn.communicators.base import Communicator
from multibn.communicators.lines import FIRST_MESSAGES, HostArray, LineCommunicator, Lines


class CountingCommunicator(LineCommunicator):
    """Another communicator, and the sizes of its messages; over lines, first messages apart."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.messages: list[int] = []
        self.first_messages: list[int] = []
        self._counting: _CountingLines | None = None
        self.timeout = getattr(inner, "timeout", 0.0)

    @property
    def identity(self) -> object:
        return id(self)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def lines(self) -> Any:
        if not isinstance(self.inner, LineCommunicator) or self.inner.lines is None:
            return None
        if self._counting is None:
            self._counting = _CountingLines(self.inner.lines, self)
        return self._counting

    def allreduce(self, x: Array, /) -> Array:
        self.messages.append(prod(x.shape))
        return self.inner.allreduce(x)

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def take(self) -> list[int]:
        """The sizes noted since the last call."""
        taken, self.messages = self.messages, []
        return taken


class _CountingLines:
    """The lines of the inner communicator. Layers compare themselves anew over these."""

    def __init__(self, inner: Lines, counting: CountingCommunicator) -> None:
        self._inner, self._counting = inner, counting
        self.size = inner.size
        self.agreements: dict[Any, Any] = {}
        self.buffer = inner.buffer

    def sum(self, a: HostArray, *arguments: Any, **options: Any) -> HostArray:
        is_first = options.get("number") == FIRST_MESSAGES
        counting = self._counting
        (counting.first_messages if is_first else counting.messages).append(a.size)
        return self._inner.sum(a, *arguments, **options)

    def exchange(self, buffer: HostArray, *arguments: Any) -> None:
        self._counting.messages.append(buffer.size)
        self._inner.exchange(buffer, *arguments)
