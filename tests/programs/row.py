"""A row of the table."""

from dataclasses import dataclass

STEPS = 2  # of training
PER_RANK = 4  # samples
BOUND = 1e-9  # the difference from one process that rounding in float64 explains
AMPLIFIED = 10.0  # how far from each other differences may be that a network makes of rounding
NOT_ROUNDING = 1e-6  # a difference from itself that has another reason, such as dropout


@dataclass
class Row:
    """What was tried with a program, and what came of it.

    Attributes
    ----------
    program
        The name of its distribution, by which its version is known.
    difference
        The largest difference of a parameter or buffer, or of what `tried` names, from one process
        with plain batch norm on the whole batch.
    reordered
        The same difference of another run in one process, with the samples in another order.
    local
        The same difference of ranks that do not share statistics.
    complaint
        Why the row fails; "" if it does not.
    """

    program: str
    tried: str
    result: str = ""
    difference: float | None = None
    reordered: float | None = None
    local: float | None = None
    complaint: str = ""

    def judge(self) -> "Row":
        """Complain about a difference that rounding does not explain."""
        reordered = self.reordered or 0.0
        bound = max(BOUND, AMPLIFIED * reordered)
        if not reordered < NOT_ROUNDING:
            self.complaint = f"differs from itself in one process by {reordered:.1e}"
        elif self.difference is not None and not self.difference <= bound:
            self.complaint = f"differs from one process by {self.difference:.1e}"
        elif self.local is not None and not self.local > bound:
            self.complaint = "ranks that do not share statistics do not differ either"
        elif self.difference is not None and self.difference > BOUND:
            self.result += "; the network amplifies rounding as much in one process"
        return self
