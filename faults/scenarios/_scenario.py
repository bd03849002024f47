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
    own_waits
        Whether ranks wait for ever over a user's own class, which has no deadline and no notices.
    ends, ends_under
        Whether the fault ends processes, and so needs a launch of its own; the names of the setups
        where it does although it does not elsewhere.
    lost
        Whether the fault ends processes, and rank 1 needs no error of its own. Where `own_waits`,
        rank 1 needs none either.
    setups, frameworks
        Where the fault is tried: the names of setups, and of frameworks.
    without_mpi4py
        Whether MPI's program is started without `-m mpi4py`.
    peers
        Whether the fault is tried with other libraries, too.
    per_machine
        How many ranks are on each of two machines; 0 for one machine.
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
    own_waits: bool = False
    ends: bool = False
    ends_under: tuple[str, ...] = ()
    lost: bool = False
    setups: tuple[str, ...] = OURS
    frameworks: tuple[str, ...] = ("torch", "chainer")
    without_mpi4py: bool = False
    peers: bool = True
    per_machine: int = 0
    delay: float = 0.0
    earlier: Callable[[Trial], None] | None = None
    earlier_size: int = 2
    deadline: float = DEADLINE
    name: str = ""

    def runs_under(self, setup: Setup) -> bool:
        """Whether the fault is tried in a setup, on one machine."""
        if self.per_machine or (setup.beside and not self.peers):
            return False
        return (setup.beside or setup.name) in self.setups and setup.framework in self.frameworks

    def ends_in(self, setup: Setup) -> bool:
        return self.ends or self.lost or setup.name in self.ends_under

    def says_in(self, setup: Setup) -> str:
        return (self.says_under | self.others_say).get(setup.name, self.says)

    def waits_in(self, setup: Setup) -> bool:
        return self.own_waits and setup.name == "own"


def scenario(what: str, **options: Any) -> Callable[[Callable[[Trial], None]], Scenario]:
    """Make a fault of what every rank does."""
    return lambda run: Scenario(run, what, **options)


def of_rank_1(
    what: str,
    deed: Callable[[Trial], object] = lambda _: None,
    *,
    kind: str = "blocks",
    first: bool = False,
    then: int = 2,
    **options: Any,
) -> Scenario:
    """A fault of what rank 1 does after two steps, or before the `first` one.

    The others take two steps more, and rank 1 as many as `then` says.
    """

    def run(trial: Trial) -> None:
        trial.build(kind)
        trial.steps(0 if first else 2)
        trial.mark()
        if trial.at_fault:
            deed(trial)
        trial.steps(then if trial.at_fault else 2)

    return Scenario(run, what, **options)


def differ(
    ours: str, others: str, subject: str = "the ranks are in different places: ", end: str = ""
) -> str:
    """A pattern: the ranks 0 and 2 are in one, and rank 1 in another."""
    return rf"{subject}rank\(s\) \[0, 2\] in {ours}; rank\(s\) \[1\] in {others}{end}"
