"""Under mpiexec only: ChainerMN's communicators, and its own link as a peer.

chainermn is imported by the checks, not here: importing it initialises MPI.
"""

import functools
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model
from multibn.communicators import Communicator, SingleProcess
from multibn.communicators.chainermn import ChainerMN
from tests.helpers import parity


@functools.cache
def naive() -> Any:
    """ChainerMN's communicator for arrays in host memory, made once: its creation is collective."""
    import chainermn

    return chainermn.create_communicator("naive")


def _compare(framework: str, split: str, dtype: str, world: Communicator) -> None:
    parity.compare_with_oracle(framework, split, dtype, ChainerMN(naive()))


for _framework, _split, _dtype in parity.cases():
    globals()[f"check_{_framework}_{_split}_{_dtype}"] = functools.partial(
        _compare, _framework, _split, _dtype
    )


def _peers(**options: Any) -> tuple[Any, Any]:
    """ChainerMN's link, and ours with its conventions."""
    import chainermn

    with pytest.warns(FutureWarning):  # ChainerMN calls its own link experimental
        theirs = chainermn.links.MultiNodeBatchNormalization(parity.CHANNELS, naive(), **options)
    ours = MultiNodeBatchNormalization(
        parity.CHANNELS, naive(), **options, weighting="rank", avg_var="unbiased_local"
    )
    return theirs, ours


def _train(link: Any, x: Any, dy: Any, **arguments: Any) -> list[Any]:
    import chainer

    link.cleargrads()
    v = chainer.Variable(x)
    with warnings.catch_warnings():
        # ChainerMN's link still asks for its device number, which Chainer 7 deprecates.
        warnings.filterwarnings("ignore", "Link._device_id", DeprecationWarning)
        y = link(v, **arguments)
    y.grad = dy
    y.backward()
    return [y.array, v.grad, *(p.grad for _, p in sorted(link.namedparams()))]


def _compare_with_chainermn(world: Communicator, *, finetune: bool = False, **options: Any) -> None:
    theirs, ours = _peers(dtype=np.float64, **options)
    pairs: list[tuple[Any, Any]] = []
    for step in range(3):
        xs, dys = parity.batches("even", world.size, "float64", seed=step)
        arguments = {"finetune": True} if finetune else {}
        pairs += zip(
            *[
                _train(link, xs[world.rank], dys[world.rank], **arguments)
                for link in (theirs, ours)
            ],
            strict=True,
        )
    assert theirs.N == ours.N == (3 if finetune else 0)
    pairs += [(theirs.avg_mean, ours.avg_mean), (theirs.avg_var, ours.avg_var)]
    for expected, got in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def check_equals_chainermn(world: Communicator) -> None:
    _compare_with_chainermn(world)


def check_equals_chainermn_in_finetuning(world: Communicator) -> None:
    _compare_with_chainermn(world, finetune=True)


def check_equals_chainermn_without_gamma(world: Communicator) -> None:
    _compare_with_chainermn(world, use_gamma=False)


def check_equals_chainermn_without_beta(world: Communicator) -> None:
    _compare_with_chainermn(world, use_beta=False)


def check_npz_files_interchange(world: Communicator) -> None:
    import io

    import chainer

    theirs, ours = _peers()
    xs, dys = parity.batches("even", world.size, "float32", seed=0)
    for link in (theirs, ours):
        _train(link, xs[world.rank], dys[world.rank], finetune=True)
    for source, target in ((theirs, _peers()[1]), (ours, _peers()[0])):
        file = io.BytesIO()
        chainer.serializers.save_npz(file, source)
        file.seek(0)
        chainer.serializers.load_npz(file, target, strict=True)
        assert target.N == source.N == 1
        for name in ("avg_mean", "avg_var"):
            np.testing.assert_array_equal(getattr(target, name), getattr(source, name))
        for (_, a), (_, b) in zip(
            sorted(source.namedparams()), sorted(target.namedparams()), strict=True
        ):
            np.testing.assert_array_equal(a.array, b.array)


def check_link_returns_the_communicator_it_was_given(world: Communicator) -> None:
    import copy

    link = MultiNodeBatchNormalization(3, naive())
    assert link.comm is naive()
    assert copy.deepcopy(link).comm is naive()
    assert link.copy().comm is naive()
    assert link.copy("init").comm is naive()


def check_pickles_find_one_communicator(world: Communicator) -> None:
    """Layers that shared a communicator share the one that is made for them when they load."""
    links = [MultiNodeBatchNormalization(3, naive()) for _ in range(2)]
    found = pickle.loads(pickle.dumps(links))
    assert found[0].comm is found[1].comm
    assert (found[0].comm.rank, found[0].comm.size) == (world.rank, world.size)
    alone = pickle.loads(pickle.dumps(ChainerMN(naive()).split(world.rank)))
    assert isinstance(alone, SingleProcess)


def check_backend_rules(world: Communicator) -> None:
    for backend, message in (("nccl", "pure_nccl"), ("smoke signals", "'mpi', 'nccl' or 'auto'")):
        with pytest.raises(ValueError, match=message):
            MultiNodeBatchNormalization(3, naive(), communication_backend=backend)
        with pytest.raises(ValueError, match=message):
            create_mnbn_model(_small_model(), naive(), backend)
    for backend in ("mpi", "auto"):
        communicator = ChainerMN(naive(), backend)
        assert communicator.communication_backend == "mpi"


def check_multi_node_optimizer_trains(world: Communicator) -> None:
    """create_multi_node_optimizer averages gradients that are means already: nothing changes."""
    import chainer
    import chainermn

    model = create_mnbn_model(_small_model(), naive())
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), naive())
    optimizer.setup(model)
    rng = np.random.default_rng(world.rank)
    for _ in range(3):
        model.cleargrads()
        loss = chainer.functions.mean(model(rng.normal(size=(4, 2, 5, 5)).astype("f")) ** 2)
        loss.backward()
        before = model[1].gamma.grad.copy()
        naive().multi_node_mean_grad(model)
        np.testing.assert_allclose(model[1].gamma.grad, before, rtol=1e-6)
        optimizer.update()
    values = world.allreduce(model[1].gamma.array.astype(np.float64))
    np.testing.assert_allclose(values / world.size, model[1].gamma.array, rtol=1e-6)


def _small_model() -> Any:
    import chainer
    from chainer import links as L

    return chainer.Sequential(
        L.Convolution2D(2, 3, 3, initialW=0.1), L.BatchNormalization(3), chainer.functions.relu
    )
