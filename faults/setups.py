"""The columns of the table: transports and libraries."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setup:
    """A way to run layers on several ranks."""

    name: str
    title: str  # the heading of the column
    framework: str  # "torch" or "chainer"
    world: str  # the class in faults/torch_worlds.py or faults/chainer_worlds.py
    launcher: str  # "torchrun" or "mpiexec"
    is_peer: bool = False  # the layers are another library's
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of the ranks


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
    Setup("naive formula", "the naive formula on gloo", "torch", "NaiveFormula", "torchrun", True),
    Setup("ChainerMN's link", "ChainerMN's link", "chainer", "ChainerMNLink", "mpiexec", True),
)

SETUPS = {setup.name: setup for setup in (*_OURS, *_PEERS)}
OURS = tuple(setup.name for setup in _OURS)
PEERS = tuple(setup.name for setup in _PEERS)
