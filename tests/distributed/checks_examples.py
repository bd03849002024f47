"""The examples in the docstrings of communicators that need a launcher, on two ranks."""

import inspect

from multibn.communicators import Communicator
from tests.helpers import examples, require


def check_the_communicator_of_the_launcher(world: Communicator) -> None:
    """TorchDistributed or MPI."""
    _check(type(world))


def check_chainermn(world: Communicator) -> None:
    from multibn.communicators.chainermn import ChainerMN

    if type(world).__name__ == "MPI" and require.available("chainer"):
        _check(ChainerMN)


def _check(communicator: type) -> None:
    complaints = examples.complaints(communicator.__name__, inspect.getdoc(communicator) or "")
    assert not complaints, complaints
