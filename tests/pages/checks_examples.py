"""The examples in docstrings that need a launcher, on two ranks."""

import inspect
from typing import Any

from multibn.communicators import Communicator
from tests.harness.runs import on, only
from tests.helpers import examples

RUNS = on("torchrun mpiexec", 2)


def check_the_example_of_the_launchers_communicator_runs(world: Communicator) -> None:
    """TorchDistributed or MPI."""
    _check(type(world))


@only("mpiexec", needs=("chainer",))
def check_the_example_of_chainermn_runs(world: Communicator) -> None:
    from multibn.communicators.transports.chainermn import ChainerMN

    _check(ChainerMN)


def _check(public: Any) -> None:
    complaints = examples.complaints(public.__name__, inspect.getdoc(public) or "")
    assert not complaints, complaints
