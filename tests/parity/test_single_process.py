"""Both surfaces in one process against the oracle, in the cases that launchers run on several."""

import pytest

from multibn.communicators import Communicator, DefaultCommunicator, SingleProcess
from tests.helpers import conformance, parity, require


@pytest.mark.parametrize("communicator", [SingleProcess(), DefaultCommunicator()], ids=repr)
@pytest.mark.parametrize("framework, split, dtype", parity.cases())
def test_against_the_oracle(
    framework: str, split: str, dtype: str, communicator: Communicator
) -> None:
    require.need(framework)
    if split != "empty":  # one rank that is empty has nothing to compare
        parity.compare_with_oracle(framework, split, dtype, communicator)


@pytest.mark.parametrize("communicator", [SingleProcess(), DefaultCommunicator()], ids=repr)
def test_communicators_of_one_process_conform(communicator: Communicator) -> None:
    conformance.check_communicator(communicator)
