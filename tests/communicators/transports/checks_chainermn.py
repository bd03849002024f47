"""ChainerMN's communicators, and its own link as a peer; under mpiexec only.

chainermn is imported by the checks, not here: importing it initialises MPI.
"""

import pickle
from typing import Any

import numpy as np
import pytest

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.communicators import Communicator, SingleProcess
from multibn.communicators.transports.chainermn import ChainerMN
from multibn.parity.cases import CHANNELS
from tests.harness.runs import on
from tests.helpers import parity
from tests.originals.checks_chainermn_trainer import known_warnings, naive

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

RUNS = on("mpiexec", 2, 3, 4, needs="chainer")

THEIRS: Any = {"weighting": "rank", "avg_var": "unbiased_local"}


def _peers(**options: Any) -> tuple[Any, Any]:
    """ChainerMN's link, and ours with its conventions."""
    import chainermn

    with known_warnings():
        theirs = chainermn.links.MultiNodeBatchNormalization(CHANNELS, naive(), **options)
    ours = MultiNodeBatchNormalization(CHANNELS, naive(), **options, **THEIRS)
    return theirs, ours


def _whole_mean(xs: list[Any]) -> Any:
    return np.concatenate([np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in xs], 1).mean(1)


def _train(link: Any, x: Any, dy: Any, **arguments: Any) -> list[Any]:
    link.cleargrads()
    v = chainer.Variable(x)
    with known_warnings():
        y = link(v, **arguments)
    y.grad = dy
    y.backward()
    return [y.array, v.grad, *(p.grad for _, p in sorted(link.namedparams()))]


def check_the_link_equals_chainermns(world: Communicator) -> None:
    """Also on uneven batches, where its numbers are not those of the whole batch."""
    plain: list[dict[str, Any]] = [{"use_gamma": False}, {"use_beta": False}]
    cases: list[Any] = [
        (split, t, {}) for split in ("even", "uneven", "spatial") for t in (False, True)
    ]
    for split, finetune, options in (*cases, *(("even", False, given) for given in plain)):
        links = _peers(dtype=np.float64, **options)
        for step in range(3):
            xs, dys = parity.batches(split, world.size, "float64", seed=step)
            arguments = {"finetune": True} if finetune else {}
            found = [_train(link, xs[world.rank], dys[world.rank], **arguments) for link in links]
            averages = [[link.avg_mean, link.avg_var, link.N] for link in links]
            for expected, got in zip(*found, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
            for expected, got in zip(*averages, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-9)
        assert (3 if finetune else 0) == links[0].N


def check_pickles_find_one_communicator(world: Communicator) -> None:
    """Layers that shared a communicator find one of MPI's when they load."""
    links = [MultiNodeBatchNormalization(3, naive()) for _ in range(2)]
    found = pickle.loads(pickle.dumps(links))
    assert found[0].comm.mpi_comm is found[1].comm.mpi_comm
    assert (found[0].comm.rank, found[0].comm.size) == (world.rank, world.size)
    alone = pickle.loads(pickle.dumps(ChainerMN(naive()).split(world.rank)))
    assert isinstance(alone, SingleProcess)


def check_a_backend_that_does_not_fit_is_refused(world: Communicator) -> None:
    for backend, message in (("nccl", "pure_nccl"), ("smoke", "one of 'mpi', 'nccl', 'auto'")):
        with pytest.raises(ValueError, match=message):
            MultiNodeBatchNormalization(3, naive(), communication_backend=backend)
    for backend in ("mpi", "auto"):
        communicator = ChainerMN(naive(), backend)
        assert communicator.communication_backend == "mpi"


def check_chainermns_link_updates_twice_in_forgotten_blocks(world: Communicator) -> None:
    """The negative control: ours updates once."""
    xs, _ = parity.batches("even", world.size, "float64", seed=0)
    updates = []
    for link in _peers(dtype=np.float64):
        with known_warnings():
            F.sum(F.forget(link, chainer.Variable(xs[world.rank])) ** 2).backward()
        updates.append(link.avg_mean / _whole_mean(xs))
    for update, expected in zip(updates, (0.19, 0.1), strict=True):
        np.testing.assert_allclose(update, expected, rtol=1e-9)


def check_allreduce_persistent_keeps_averages_that_are_equal(world: Communicator) -> None:
    """Averages that are equal stay as they are; those of ChainerMN's convention become equal."""
    from chainermn.extensions import AllreducePersistent

    xs, _ = parity.batches("uneven", world.size, "float64", seed=0)
    found = []
    for conventions in (dict[str, Any](), THEIRS):
        link = MultiNodeBatchNormalization(CHANNELS, naive(), dtype=np.float64, **conventions)
        link(xs[world.rank])
        before = link.avg_var.copy()
        sums = world.allreduce(before)
        AllreducePersistent(link, naive())()
        found.append((before, sums / world.size, link.avg_var))
    (before, _, after), (_, mean, averaged) = found
    np.testing.assert_allclose(after, before, rtol=1e-14)
    np.testing.assert_allclose(averaged, mean, rtol=1e-14)
