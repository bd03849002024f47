"""The Chainer link on real processes, driven by the launcher's own communicator."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model
from multibn.communicators import Communicator
from multibn.parity import oracle
from tests.harness.runs import on
from tests.helpers.normalized import normalized

import chainer  # isort: skip (multibn makes it importable)
from chainer import links as L  # isort: skip

RUNS = on("torchrun mpiexec", 2, 3, needs="chainer")


def _input(world: Communicator, *shape: int) -> Any:
    return np.random.default_rng(world.rank).normal(size=shape).astype("float32")


def check_outputs_keep_their_digits_at_a_high_mean(world: Communicator) -> None:
    xs = [
        np.random.default_rng(rank).normal(1e4, 1, (64, 2)).astype("float32")
        for rank in range(world.size)
    ]
    zeros = [np.zeros_like(x) for x in xs]
    expected = oracle.batch_norm(xs, zeros, np.ones(2), np.zeros(2), eps=2e-5)
    y = MultiNodeBatchNormalization(2, world)(xs[world.rank])
    np.testing.assert_allclose(y.array, expected.y[world.rank], atol=1e-5)


def check_finetuning_is_the_cumulative_average(world: Communicator) -> None:
    link = MultiNodeBatchNormalization(2, world, dtype=np.float64)
    link(np.random.default_rng(world.rank).normal(size=(3, 2)))
    link.start_finetuning()
    means, variances = [], []
    for step, n in enumerate((2, 0, 5)):
        xs = [np.random.default_rng((step, rank)).normal(size=(n, 2)) for rank in range(world.size)]
        if n:
            means.append(np.concatenate(xs).mean(0))
            variances.append(np.concatenate(xs).var(0, ddof=1))
        link(xs[world.rank], finetune=True)
    assert link.N == 2
    np.testing.assert_allclose(link.avg_mean, np.mean(means, axis=0), rtol=1e-12)
    np.testing.assert_allclose(link.avg_var, np.mean(variances, axis=0), rtol=1e-12)


def check_any_axes_can_be_channels(world: Communicator) -> None:
    """`size` as a tuple, and `axis`, are the same numbers with the axes moved."""
    xs = [np.random.default_rng(r).normal(size=(3, 2, 4, 5)) for r in range(world.size)]
    x = xs[world.rank]
    plain = MultiNodeBatchNormalization(2, world, dtype=np.float64)
    last = MultiNodeBatchNormalization(None, world, dtype=np.float64, axis=(0, 1, 2))
    y = plain(x).array
    np.testing.assert_allclose(last(np.moveaxis(x, 1, 3)).array, np.moveaxis(y, 1, 3), rtol=1e-12)
    assert last.avg_mean.shape == (2,)
    per_pixel = MultiNodeBatchNormalization((2, 4, 5), world, dtype=np.float64)
    got = per_pixel(x).array
    flat = normalized([v.reshape(3, -1) for v in xs], 2e-5)[world.rank]
    np.testing.assert_allclose(got, flat.reshape(x.shape), rtol=1e-10)


def check_copies_share_the_group(world: Communicator) -> None:
    group = world.split(world.rank % 2)
    model = create_mnbn_model(chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4)), group)
    x = _input(world, 5, 3)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        *(model.copy(mode) for mode in ("share", "copy")),
    ]
    expected = model(x).array
    for other in copies:
        np.testing.assert_array_equal(other(x).array, expected)
        assert (other[1].comm.rank, other[1].comm.size) == (group.rank, group.size)
    assert copies[0][1].comm is group
    assert copies[0][1].gamma is not model[1].gamma
    assert model[1].comm is group
    world.allreduce(np.zeros(1))  # nobody leaves while another group still works


def check_bad_input_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    good = np.ones((2, 3, 4), "float32")
    cases: list[tuple[Any, type[Exception], str]] = [
        (good[0, 0], ValueError, r"2 or more dimensions.*got shape \(4,\)"),
        (good[:, :2], ValueError, r"channels of shape \(3,\).*got \(2,\) in shape \(2, 2, 4\)"),
        (good[:, :0], ValueError, r"must have channels: got \(0,\) in shape \(2, 0, 4\)"),
        (good.astype("int32"), TypeError, "real floating-point dtype: got int32"),
        (None, TypeError, "must be a Variable or an array: got NoneType"),
    ]
    link = MultiNodeBatchNormalization(3, world)
    for bad, kind, message in cases:
        for culprit in (0, world.size - 1):
            if world.rank == culprit:
                with pytest.raises(kind, match=message):
                    link(bad)
            else:
                with pytest.raises(RuntimeError, match=rf"refused on rank\(s\) \[{culprit}\] of"):
                    link(good)
    x = np.ones((1 if world.rank == 0 else 0, 3), "float32")
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*got 1 on \d rank"):
        link(x)
    link(good)  # and the link still works


def check_nan_in_a_gradient_is_named_in_debug_mode(world: Communicator) -> None:
    link = MultiNodeBatchNormalization(3, world)
    y = link(np.random.default_rng(world.rank).normal(size=(4, 3)).astype(np.float32))
    y.grad = np.ones((4, 3), np.float32)
    if world.rank == 1:
        y.grad[0, 0] = np.nan
    message = rf"gradient of the output of .* has NaN on rank\(s\) \[1\] of {world.size}\. Look f"
    with chainer.using_config("debug", True), pytest.raises(FloatingPointError, match=message):
        y.backward()
