"""What a fault is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.trial import Trial

DEADLINE = 3.0  # seconds, MULTIBN_TIMEOUT of every scenario
SILENCE = DEADLINE + 1.0  # seconds that it takes to give up a rank that says nothing


@dataclass(frozen=True)
class Scenario:
    """A fault.

    Attributes
    ----------
    run
        What every rank does.
    what
        The fault, for people.
    says
        What the error must say, a regular expression; "" if the fault must do no harm.
    seconds
        How long after `mark` the last rank may end, errors included.
    spared
        Whether rank 1 needs no error of its own.
    ends
        Whether it ends processes, and so needs a launch of its own.
    frameworks, over
        Where it can happen.
    plain
        Whether MPI's program is started without `-m mpi4py`.
    today
        Whether the peers are shown beside it.
    hosts
        Whether it takes two hosts, with a rank on each.
    delay
        Seconds that the line between them takes, each way; 0 for one that is as fast as it can be.
    earlier, earlier_size
        What an earlier launch does, on that many ranks; it leaves files in `trial.files`.
    deadline
        MULTIBN_TIMEOUT.
    """

    run: Callable[[Trial], None]
    what: str
    says: str = ""
    seconds: float = 1.0
    spared: bool = False
    ends: bool = False
    frameworks: tuple[str, ...] = ("torch", "chainer")
    over: tuple[str, ...] = ("gloo", "mpi")
    plain: bool = False
    today: bool = True
    hosts: bool = False
    delay: float = 0.0
    earlier: Callable[[Trial], None] | None = None
    earlier_size: int = 2
    deadline: float = DEADLINE
    name: str = field(default="")


def scenario(what: str, **options: Any) -> Callable[[Callable[[Trial], None]], Scenario]:
    """Make a fault of a function, by whose name it goes."""
    return lambda run: Scenario(run, what, name=run.__name__, **options)
