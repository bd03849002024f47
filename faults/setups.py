"""The columns of the table: what the layers communicate over, and what is promised there."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Promises:
    """What multibn can promise over a transport, for people.

    Attributes
    ----------
    over
        The transport.
    first_message
        Whether names, sizes and versions are compared before the first message.
    fingerprints
        Whether each later message tells that it is of another layer, phase or dtype.
    deadline
        Whether silence ends at MULTIBN_TIMEOUT.
    notices
        Whether a rank that leaves or fails tells the others.
    killed
        What the other ranks see of a rank that is killed.
    """

    over: str
    first_message: str
    fingerprints: str
    deadline: str
    notices: str
    killed: str


_KILLED = "`ConnectionError` with its rank and layer"
_SHARED = Promises("gloo, ranks of one machine: shared memory", "yes", "yes", "yes", "yes", _KILLED)
_GLOO = Promises("gloo, ranks of several machines", "yes", "yes", "yes", "yes", _KILLED)
_DDP = Promises(
    "shared memory, under DistributedDataParallel",
    "yes, after DistributedDataParallel has compared the parameters",
    "yes",
    "yes, but between the last layer's backward pass and the end of the step; "
    "with `register_allreduce_hook` there too",
    "yes, as the deadline",
    "`ConnectionError` with its rank and layer, as the deadline",
)
_MPI = Promises(
    "MPI; ChainerMN, arrays in host memory",
    "yes",
    "yes",
    "yes; in the first message it names all ranks that it has not heard of",
    "yes",
    "`mpiexec` ends all ranks, and names the rank and the signal",
)
_OWN = Promises(
    "a class of the user's own; ChainerMN's with another `allreduce`",
    "yes",
    "yes",
    "no",
    "no",
    "what its transport does: under `mpiexec` as above",
)
# By what the code does: `make faults` needs no GPU.
_UNTRIED = (
    Promises("CUDA tensors over gloo", *["as gloo"] * 5),
    Promises(
        "CUDA tensors over NCCL",
        "yes, with the deadline",
        "yes, one call late",
        "no: torch's watchdog, the group's timeout",
        "no",
        "torch's watchdog",
    ),
    Promises(
        "GPU arrays over pure_nccl, or MPI that is CUDA-aware",
        "yes, over the communicator for host memory",
        "yes, one call late",
        "no",
        "no",
        "the launcher's words",
    ),
)
PROMISES = (_SHARED, _GLOO, _DDP, _MPI, _OWN, *_UNTRIED)


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
    promises
        What is promised; None of another library's layers.
    variables
        Of the environment of the ranks.
    beside
        Of another library's layers: the setup that they stand beside.
    """

    name: str
    title: str
    framework: str
    launcher: str
    promises: Promises | None
    beside: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_deadline(self) -> bool:
        return self.promises is None or self.promises.deadline != "no"

    @property
    def has_notices(self) -> bool:
        return self.promises is None or self.promises.notices != "no"


_OURS = (
    Setup("shared memory", "shared memory", "torch", "torchrun", _SHARED),
    Setup("gloo", "gloo", "torch", "torchrun", _GLOO, variables={"MULTIBN_SHARED_MEMORY": "0"}),
    Setup("ddp", "shared memory, under DDP", "torch", "torchrun", _DDP),
    Setup("mpi", "MPI", "torch", "mpiexec", _MPI),
    Setup("chainermn", "ChainerMN, naive", "chainer", "mpiexec", _MPI),
    Setup("own", "a user's own class", "torch", "mpiexec", _OWN),
)
_PEERS = (
    Setup("naive formula", "the naive formula on gloo", "torch", "torchrun", None, "gloo"),
    Setup("ChainerMN's link", "ChainerMN's link", "chainer", "mpiexec", None, "mpi"),
)

SETUPS = {setup.name: setup for setup in (*_OURS, *_PEERS)}
OURS = tuple(setup.name for setup in _OURS)
PEERS = tuple(setup.name for setup in _PEERS)
