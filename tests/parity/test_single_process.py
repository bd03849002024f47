"""Both layers in one process against the oracle, in the cases that launchers run on several."""

import pytest

from multibn.communicators import Communicator, DefaultCommunicator, SingleProcess
from tests.communicators import conformance
from tests.helpers import parity, require


@pytest.mark.parametrize("communicator", [SingleProcess(), DefaultCommunicator()], ids=repr)
@pytest.mark.parametrize("framework", ["torch", "chainer"])
def test_one_process_equals_the_oracle(framework: str, communicator: Communicator) -> None:
    require.need(framework)
    parity.check(framework, communicator)


@pytest.mark.parametrize("communicator", [SingleProcess(), DefaultCommunicator()], ids=repr)
def test_communicators_of_one_process_conform(communicator: Communicator) -> None:
    conformance.check_communicator(communicator)
