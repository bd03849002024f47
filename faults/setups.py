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
    world
        The class of that framework's worlds.
    launcher
        What starts the ranks, "torchrun" or "mpiexec".
    beside
        Of another library's layers: the setup that they stand beside.
    variables
        Of the environment of the ranks.
    """

    name: str
    title: str
    framework: str
    world: str
    launcher: str
    beside: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


_NO_SHARED_MEMORY = {"MULTIBN_SHARED_MEMORY": "0"}
_OURS = (
    Setup("shared memory", "shared memory", "torch", "Gloo", "torchrun"),
    Setup("gloo", "gloo", "torch", "Gloo", "torchrun", variables=_NO_SHARED_MEMORY),
    Setup("ddp", "shared memory, under DDP", "torch", "DataParallel", "torchrun"),
    Setup("mpi", "MPI", "torch", "Mpi", "mpiexec"),
    Setup("chainermn", "ChainerMN, naive", "chainer", "ChainerMN", "mpiexec"),
    Setup("own", "a user's own class", "torch", "Own", "mpiexec"),
)
_PEERS = (
    Setup(
        "naive formula", "the naive formula on gloo", "torch", "NaiveFormula", "torchrun", "gloo"
    ),
    Setup("ChainerMN's link", "ChainerMN's link", "chainer", "ChainerMNLink", "mpiexec", "mpi"),
)

SETUPS = {setup.name: setup for setup in (*_OURS, *_PEERS)}
OURS = tuple(setup.name for setup in _OURS)
PEERS = tuple(setup.name for setup in _PEERS)
