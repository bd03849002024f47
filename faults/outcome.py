"""The result of a fault on each rank, and whether the result is as it should be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.scenarios import Scenario
from faults.setups import Setup

ANNOUNCEMENT = "multibn: "  # prefix of the lines that multibn prints to stderr


@dataclass
class Rank:
    """The result of one rank in one scenario."""

    how: str  # "ok", "error", a signal such as "SIGABRT", "ended", "is stopped", or "hangs"
    says: str = ""  # the error message, as Python prints it
    seconds: float = 0.0  # from the fault to the end
    off: float = 0.0  # if "ok": the largest error of the rank's numbers
    digest: str = ""  # if "ok": a digest of the rank's statistics
    ended: bool = False  # whether the process has ended
    printed: Sequence[str] = ()  # lines since the fault

    @property
    def is_announced(self) -> bool:
        """Whether multibn has printed the error message to stderr."""
        return bool(self._announcement)

    @property
    def _announcement(self) -> str:
        """The printed line with the beginning of the error message; "" if there is none."""
        message = ANNOUNCEMENT + self.says.partition(": ")[2].partition("\n")[0]
        said = (line for line in self.printed if line.startswith(ANNOUNCEMENT))
        return next((line for line in said if message.startswith(line)), "")

    @property
    def misplaced(self) -> str:
        """A complaint if the first line after the fault is not the announcement; otherwise ""."""
        if not self.is_announced or self.printed[0] == self._announcement:
            return ""
        return f"prints first: {self.printed[0]}"


@dataclass
class Outcome:
    """The result of a scenario on all ranks."""

    scenario: Scenario
    setup: Setup
    ranks: list[Rank] = field(default_factory=list)
    exit_status: int | None = None  # of the launcher; None if the launcher had to be killed
    output: str = ""  # what the launcher printed

    def __post_init__(self) -> None:
        self._says = self.scenario.says_in(self.setup)
        self._ends = self.scenario.ends_in(self.setup)
        self._waits = self.scenario.waits_in(self.setup)
        self._others_speak = self.setup.name in self.scenario.others_say
        # The ranks that must raise an error if the fault could do harm.
        without_1 = self.scenario.lost or self.scenario.own_waits
        self._bystanders = [r for r in range(len(self.ranks)) if not (without_1 and r == 1)]

    @property
    def seconds(self) -> float:
        """Seconds from the fault until the last bystander has finished."""
        ends = [self.ranks[r] for r in self._bystanders]
        return max((r.seconds for r in ends if r.how in ("ok", "error")), default=0.0)

    @property
    def seen(self) -> str:
        """The first line of the message that tells the user about the fault."""
        # Prefer a rank's message about itself to another rank's report.
        named = sorted(self._named(), key=lambda text: "has failed: " in text)
        return next(iter([*named, *self._errors()]), "")

    def _errors(self) -> list[str]:
        return [r.says.partition("\n")[0] for r in self.ranks if r.how == "error"]

    def _named(self) -> list[str]:
        """Return the messages of ranks and launchers that match the expected pattern."""
        # A launcher's message may span lines. MPI may print in a process that MPI then aborts.
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n?-{9,}\n", self.output)]
        last_words = [line for r in self.ranks if r.how == "ended" for line in r.printed]
        said = [*self._errors(), *paragraphs, *last_words]
        return [text for text in said if self._says and re.search(self._says, text)]

    def complaint(self, slack: float = 0.0) -> str:
        """Describe what differs from the expected outcome; "" if nothing. `slack` is in seconds."""
        if self._waits:
            moved = [r for r in self._bystanders if self.ranks[r].how != "hangs"]
            return f"rank(s) {moved} did not wait" if moved else ""
        for rank, became in enumerate(self.ranks):
            if became.how not in ("ok", "error", "ended", "is stopped"):
                return f"rank {rank} {became.how}; {' and '.join(sorted(set(self._errors())))}"
        if not self._says:
            return self._harm()
        if not self._named():
            return f"no message matches {self._says!r}"
        ended = all(self.ranks[r].ended for r in self._bystanders)
        if self._ends and (not ended or self.exit_status == 0):
            return f"exit status {self.exit_status}" if ended else "the processes have not ended"
        return "" if self._others_speak else self._complaint_about_errors(slack)

    def _complaint_about_errors(self, slack: float) -> str:
        for rank, became in enumerate(self.ranks):
            # An error that is neither expected nor announced by multibn comes from the transport.
            expected = re.search(self._says, became.says) or became.says.startswith("SystemExit")
            if became.how == "error" and not (expected or became.is_announced):
                return f"rank {rank} sees a raw error: {became.says[:200]}"
            if self._ends and became.misplaced:
                return f"rank {rank} {became.misplaced}"
        fine = [r for r in self._bystanders if self.ranks[r].how == "ok"]
        if fine:
            return f"rank(s) {fine} saw no error"
        if self.seconds > self.scenario.seconds + slack:
            return f"took {self.seconds:.2f} s"
        return ""

    def verdict(self) -> str:
        """Return what a user of multibn experiences, in one word."""
        if self._waits:
            return "waits"
        if not self._says:
            return "right"
        if self._others_speak:
            return "DDP" if self.setup.name == "ddp" else "launcher"
        return "deadline" if self.seconds >= self.scenario.deadline else "named"

    def peer_verdict(self) -> str:
        """Return what a user of another library experiences."""
        others = [r for i, r in enumerate(self.ranks) if not (self._ends and i == 1)]
        signals = sorted({r.how for r in self.ranks if r.how.startswith("SIG")})
        if any(r.how == "hangs" for r in others):
            return " and ".join(["hangs", *signals])
        if signals:
            return ", ".join(signals)
        if any(r.how == "error" for r in others):
            return "error"
        if all(r.how == "ended" for r in others):
            return f"ended by {self.setup.launcher}"
        fine = all(r.off < 1e-4 for r in others) and len({r.digest for r in others}) == 1
        return "right" if fine else "silent wrong numbers"

    def _harm(self) -> str:
        for rank, became in enumerate(self.ranks):
            if became.how != "ok":
                return f"rank {rank}: {became.how} {became.says}"
            if not became.off <= 1e-12:
                return f"rank {rank} is off by {became.off:.1g}"
            need_not_print = not self.scenario.prints or rank == 1
            if not need_not_print and not re.search(
                self.scenario.prints, "\n".join(became.printed)
            ):
                return f"rank {rank} prints no line that matches {self.scenario.prints!r}"
        if len({r.digest for r in self.ranks}) > 1:
            return "the ranks' statistics differ"
        if self._ends and self.exit_status != self.scenario.exit_status:
            return f"exit status {self.exit_status}"
        return ""
