"""Both layers, driven by the launcher's own communicator, against the whole-batch oracle."""

from multibn.communicators import Communicator, SingleProcess
from multibn.parity import oracle
from multibn.parity.cases import Case
from multibn.parity.worker import ADAPTERS, expected
from tests.harness.runs import on
from tests.helpers import parity

RUNS = on("torchrun mpiexec", 2, 4)

globals().update(parity.checks())


def check_ordinary_batch_norm_on_the_parts_differs(world: Communicator) -> None:
    """The negative control: without a communicator the oracle is missed."""
    case = Case("control", dtype="float64", steps=1)
    xs, dys, _ = case.batches(world.size, 0)
    want = expected(case, world.rank, world.size)
    for framework in parity.frameworks():
        layer = ADAPTERS[framework](case, SingleProcess())
        y, dx = layer.train(xs[world.rank], dys[world.rank])
        assert oracle.relative_error(y, want["0/y"]) > 1e-2
        assert oracle.relative_error(dx, want["0/dx"]) > 1e-2
