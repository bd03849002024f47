"""Calls that one rank makes wrongly, over ranks as threads."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import ThreadCommunicator, run_ranks


def errors_of_rank_0(
    call: Callable[[bool, ThreadCommunicator], Any], kind: type[Exception], message: str
) -> None:
    """Rank 0 makes the wrong call, of which the other rank must learn."""

    def run(communicator: ThreadCommunicator) -> None:
        wrong = communicator.rank == 0
        expected = (kind, message) if wrong else (RuntimeError, r"refused on rank\(s\) \[0\]")
        with pytest.raises(expected[0], match=expected[1]):
            call(wrong, communicator)

    run_ranks(2, run)
