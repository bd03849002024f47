"""Notices that ranks leave for each other, and what a transport tells of them by itself."""

from typing import NamedTuple, Protocol


class Status(NamedTuple):
    """A word of a rank for the others, which JSON can hold."""

    state: str  # "waits", "looks" for a lost rank, "failed" or "left"
    completed: int  # how many collectives the rank has completed
    text: str  # where the rank waits, for people, or what went wrong


class StatusBoard(Protocol):
    """Where ranks leave notices for each other; never blocks for long."""

    def publish(self, notice: Status, /) -> None:
        """Leave the latest notice of this rank."""

    def read(self) -> dict[int, Status]:
        """The latest notice of each other rank that has left one."""

    def close(self) -> None:
        """Finish publishing before the process ends."""
        return


class RankLostError(RuntimeError):
    """A rank sends no more, as a transport has seen: its process has ended, or it `has_left`.

    A rank that has left has let go of the group in order, while this one waits for its message.
    """

    def __init__(self, rank: int, *, has_left: bool = False) -> None:
        what = f"rank {rank} has left" if has_left else f"the process of rank {rank} has ended"
        super().__init__(what)
        self.rank, self.has_left = rank, has_left
