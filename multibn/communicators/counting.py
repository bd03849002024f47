"""A communicator that notes what passes through it."""

from math import prod
from typing import Any

from multibn.communicators import Communicator


class CountingCommunicator:
    """Notes the size of every message of another communicator."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.messages: list[int] = []

    def allreduce(self, x: Any, /) -> Any:
        self.messages.append(prod(x.shape))
        return self.inner.allreduce(x)

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def take(self) -> list[int]:
        """The sizes noted since the last call."""
        taken, self.messages = self.messages, []
        return taken
