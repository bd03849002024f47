"""What a fault is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.setups import OURS, Setup
from faults.trial import Trial

DEADLINE = 3.0  # seconds, MULTIBN_TIMEOUT of most scenarios
SILENCE = DEADLINE + 1.0  # seconds after which every rank has given up a rank that says nothing


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
        What the error on every rank must say, a regular expression; "" if the fault must do no
        harm.
    says_under
        `says` where the words are others, by the setup's name.
    others_say
        What a launcher, MPI or DistributedDataParallel says in the setups where they see the fault
        before multibn can; the ranks need no error of multibn's there.
    seconds
        How long after `mark` the last rank may end, errors included.
    needs
        The promise without which the other ranks wait for ever: "has_deadline" or "has_notices".
    faulty_rank_may_be_silent
        Whether rank 1 needs no error of its own.
    ends, ends_under
        Whether the fault ends processes, and so needs a launch of its own; the names of the setups
        where it does although it does not elsewhere.
    setups, frameworks
        Where the fault is tried: the names of setups, and of frameworks.
    without_mpi4py
        Whether MPI's program is started without `-m mpi4py`.
    also_run_on_peers
        Whether the fault is tried with other libraries, too.
    two_machines, per_machine
        Whether the fault takes two machines, and how many ranks are on each of them.
    delay
        Seconds that the line between the machines takes each way; 0 for a line without delay.
    earlier, earlier_size
        What an earlier launch does, on that many ranks; it leaves files in `trial.files`.
    deadline
        MULTIBN_TIMEOUT.
    """

    run: Callable[[Trial], None]
    what: str
    says: str = ""
    says_under: dict[str, str] = field(default_factory=dict)
    others_say: dict[str, str] = field(default_factory=dict)
    seconds: float = 1.0
    needs: str = ""
    faulty_rank_may_be_silent: bool = False
    ends: bool = False
    ends_under: tuple[str, ...] = ()
    setups: tuple[str, ...] = OURS
    frameworks: tuple[str, ...] = ("torch", "chainer")
    without_mpi4py: bool = False
    also_run_on_peers: bool = True
    two_machines: bool = False
    per_machine: int = 1
    delay: float = 0.0
    earlier: Callable[[Trial], None] | None = None
    earlier_size: int = 2
    deadline: float = DEADLINE
    name: str = field(default="")

    def runs_under(self, setup: Setup) -> bool:
        """Whether the fault is tried in a setup, on one machine."""
        if self.two_machines or (setup.beside and not self.also_run_on_peers):
            return False
        return (setup.beside or setup.name) in self.setups and setup.framework in self.frameworks

    def ends_in(self, setup: Setup) -> bool:
        return self.ends or setup.name in self.ends_under

    def says_in(self, setup: Setup) -> str:
        return (self.says_under | self.others_say).get(setup.name, self.says)

    def waits_in(self, setup: Setup) -> bool:
        """Whether the other ranks wait for ever, because the setup cannot promise otherwise."""
        return bool(self.needs) and not getattr(setup, self.needs)


def scenario(what: str, **options: Any) -> Callable[[Callable[[Trial], None]], Scenario]:
    """Make a fault of a function, by whose name it goes."""
    return lambda run: Scenario(run, what, name=run.__name__, **options)
