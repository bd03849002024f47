"""A short part of `make soak`: nothing that a rank holds grows, and what grows is noticed."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from multibn.communicators import Communicator, as_communicator
from multibn.communicators.transports.mpi import MPI
from tests.harness.runs import on
from tests.soak.deeds import destroy, forks, groups, hold, models, new_group, saves, steps, widths
from tests.soak.held import COLUMNS, base_store

RUNS = on("torchrun mpiexec", 2, needs="torch")


_DUPLICATES = "MPI communicators"


def check_nothing_grows(world: Communicator) -> None:
    rows = [hold(deed, world, 0.1) for deed in (steps, models, _widths, groups, saves, forks)]
    assert not any(row.growth for row in rows), rows


def _widths(world: Communicator) -> None:
    widths(world, range(3, 163, 8))


def check_each_leak_is_noticed(world: Communicator) -> None:
    """The notice has the name of what leaks, and the rank; the leaks are undone."""
    over_mpi = isinstance(world, MPI)
    columns = [name for name in COLUMNS if name != ("store keys" if over_mpi else _DUPLICATES)]
    growths = {}
    for column in columns:
        with _leak(column) as leak:
            growths[column] = hold(leak, world, 0.01).growth
    for column, texts in growths.items():
        ranks = (0, 1) if column == "store keys" else (1,)  # the ranks have one store
        said = [f"rank {rank}, leak: {column} " for rank in ranks]
        assert [text[: len(said[0])] for text in texts] == said, growths


@contextmanager
def _leak(column: str) -> Iterator[Callable[[Communicator], None]]:
    """Leak on rank 1, at each turn."""
    leaked: list[Any] = []
    event = threading.Event()
    undo: list[Callable[[], object]] = [leaked.clear, event.set]

    def leak(world: Communicator) -> None:
        group = new_group(world)
        communicator: Any = as_communicator(group)
        communicator.allreduce(np.ones(1))
        channel = communicator.channel
        destroy(group)
        if world.rank == 0:
            return
        if column == "MB":
            leaked.append(np.ones(2**22))  # 34 MB: new memory, whatever was freed before
        elif column == "descriptors":
            undo.append(partial(os.close, os.dup(0)))
        elif column == "threads":
            threading.Thread(target=event.wait).start()
        elif column == "groups":
            leaked.append(channel)
        elif column == "store keys":
            key, store = f"multibn/{len(undo)}", base_store()
            store.set(key, "")
            undo.append(partial(store.delete_key, key))
        elif column == _DUPLICATES:
            from mpi4py import MPI as mpi

            undo.append(mpi.COMM_SELF.Dup().Free)

    try:
        yield leak
    finally:
        for each in undo:
            each()
