"""The examples in docstrings that need a launcher, on two ranks."""

import importlib
import inspect
from typing import Any

from multibn.communicators import Communicator
from tests.harness.runs import on, only
from tests.helpers import examples
from tests.helpers.pages import python_blocks

RUNS = on("torchrun mpiexec", 2)


def check_the_example_of_the_launchers_communicator_runs(world: Communicator) -> None:
    """TorchDistributed or MPI."""
    _check(type(world))


@only("mpiexec", needs=("chainer",))
def check_the_example_of_chainermn_runs(world: Communicator) -> None:
    from multibn.communicators.transports.chainermn import ChainerMN

    _check(ChainerMN)


@only("mpiexec", needs=("torch", "chainer"))
def check_the_blocks_of_the_readme_run(world: Communicator) -> None:
    """README's last blocks, for MPI and for Chainer; its `train.py` is a program, run elsewhere."""
    from torch import nn

    over_mpi, in_chainer = python_blocks("README.md")[-2:]
    names: dict[str, Any] = {"model": nn.Sequential(nn.BatchNorm1d(3))}
    exec(over_mpi, names)
    assert names["model"][0].process_group.size == world.size
    importlib.import_module("multibn.chainer_backend")  # makes Chainer importable
    from chainer import Sequential, links

    names = {"model": Sequential(links.BatchNormalization(3))}
    exec(in_chainer, names)
    assert names["model"][0].comm.size == world.size


def _check(public: Any) -> None:
    complaints = examples.complaints(public.__name__, inspect.getdoc(public) or "")
    assert not complaints, complaints
