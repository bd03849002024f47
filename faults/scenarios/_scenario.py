"""What a fault is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.setups import OURS, Setup
from faults.trial import Trial

DEADLINE = 3.0  # seconds, MULTIBN_TIMEOUT of most scenarios
SILENCE = DEADLINE + 1.0  # seconds after which every rank has given up a rank that says nothing


@dataclass(frozen=True)
class Scenario:
    """A fault: what every rank does, and what must become of it."""

    run: Callable[[Trial], None]
    what: str  # for people
    says: str = ""  # a regular expression of every rank's error; "" if the fault must do no harm
    says_under: dict[str, str] = field(default_factory=dict)  # by setups whose words are others
    # The words of a launcher, MPI or DistributedDataParallel in the setups where these see the
    # fault before multibn can; the ranks need no error of multibn's there.
    others_say: dict[str, str] = field(default_factory=dict)
    # A regular expression of what the other ranks print, where the fault does no harm.
    prints: str = ""
    seconds: float = 1.0  # after `mark` the last rank may end, errors included
    # Over a user's own class, which has no deadline and no notices, ranks wait for ever. Rank 1
    # needs no error then, in any setup.
    own_waits: bool = False
    waits_under: tuple[str, ...] = ()  # other setups in which ranks wait for ever
    ends: bool = False  # the fault ends processes, and so needs a launch of its own
    ends_under: tuple[str, ...] = ()  # the setups where it does although it does not elsewhere
    lost: bool = False  # the fault ends processes, and rank 1 needs no error of its own
    exit_status: int = 0  # of the launcher, where the fault does no harm
    setups: tuple[str, ...] = OURS  # where the fault is tried
    without_mpi4py: bool = False  # MPI's program is started without `-m mpi4py`
    per_machine: int = 0  # ranks on each of two machines; 0 for one machine
    delay: float = 0.0  # seconds that the line between the machines takes each way
    # The work of an earlier launch, on `earlier_size` ranks, which leaves files in `trial.files`.
    earlier: Callable[[Trial], None] | None = None
    earlier_size: int = 2
    deadline: float = DEADLINE  # MULTIBN_TIMEOUT
    variables: Mapping[str, str] = field(default_factory=dict)  # of a launch of its own
    name: str = ""

    def runs_under(self, setup: Setup) -> bool:
        """Whether the fault is tried in a setup, on one machine."""
        return not self.per_machine and setup.name in self.setups

    def ends_in(self, setup: Setup) -> bool:
        return self.ends or self.lost or setup.name in self.ends_under

    def says_in(self, setup: Setup) -> str:
        return (self.says_under | self.others_say).get(setup.name, self.says)

    def waits_in(self, setup: Setup) -> bool:
        return setup.name in self.waits_under or (self.own_waits and setup.name == "own")


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
    word = "with" if "differently" in subject or "version" in subject else "in"
    return rf"{subject}rank\(s\) \[0, 2\] {word} {ours}; rank\(s\) \[1\] {word} {others}{end}"
