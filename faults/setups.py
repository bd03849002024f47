"""The columns of the table: what the layers communicate over."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setup:
    """A way to run layers on several ranks.

    Attributes
    ----------
    name, title
        For programs and for people.
    framework
        "torch" or "chainer".
    launcher
        What starts the ranks, "torchrun" or "mpiexec".
    has_deadline
        Whether silence ends at MULTIBN_TIMEOUT.
    has_notices
        Whether a rank that leaves or fails tells the others.
    variables
        Of the environment of the ranks.
    beside
        Of another library's layers: the setup that they stand beside.
    """

    name: str
    title: str
    framework: str
    launcher: str
    beside: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    has_deadline: bool = True
    has_notices: bool = True


_OURS = (
    Setup("shared memory", "shared memory", "torch", "torchrun"),
    Setup("gloo", "gloo", "torch", "torchrun", variables={"MULTIBN_SHARED_MEMORY": "0"}),
    Setup("ddp", "shared memory, under DDP", "torch", "torchrun"),
    Setup("mpi", "MPI", "torch", "mpiexec"),
    Setup("chainermn", "ChainerMN, naive", "chainer", "mpiexec"),
    Setup("own", "a user's own class", "torch", "mpiexec", has_deadline=False, has_notices=False),
)
_PEERS = (
    Setup("naive formula", "the naive formula on gloo", "torch", "torchrun", "gloo"),
    Setup("ChainerMN's link", "ChainerMN's link", "chainer", "mpiexec", "mpi"),
)

SETUPS = {setup.name: setup for setup in (*_OURS, *_PEERS)}
OURS = tuple(setup.name for setup in _OURS)
PEERS = tuple(setup.name for setup in _PEERS)
