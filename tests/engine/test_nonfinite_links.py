"""A batch that is not finite, in Chainer: an error on all ranks, or a step without a trace."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model
from multibn.communicators import nonfinite
from tests.helpers.ranks import CountingCommunicator, run_ranks

import chainer  # isort: skip (multibn makes it importable)

NEEDS = "chainer"

L = chainer.links


def state(link: Any) -> list[Any]:
    return [link.avg_mean.copy(), link.avg_var.copy(), link.N]


@pytest.mark.filterwarnings("ignore:rank . of 2 has skipped:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")
@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("dtype, nonfinite", [(np.float16, None), (np.float32, "skip")])
def test_all_later_steps_are_those_without_the_batch(
    dtype: Any, nonfinite: Any, finetune: bool
) -> None:
    def results(communicator: Any, sees: bool) -> list[Any]:
        counting = CountingCommunicator(communicator)
        link = MultiNodeBatchNormalization(3, counting, dtype=np.float32, nonfinite=nonfinite)
        rng, found = np.random.default_rng(communicator.rank), []
        for step in range(4):
            x = chainer.Variable(rng.normal(size=(4, 3)).astype(dtype))
            if step == 2:
                if not sees:
                    continue
                x.array[0, 1] = [1, np.inf][communicator.rank]
            before, num_messages = state(link), len(counting.messages)
            y = link(x, finetune=finetune)
            y.grad = np.ones_like(y.array)
            y.backward()
            if step == 2:
                assert np.isnan(y.array).all()
                assert np.isnan(x.grad).all()
                np.testing.assert_equal(state(link), before)
                assert len(counting.messages) - num_messages == 2
            else:
                found += [y.array, x.grad, *state(link)]
        return found

    saw, never_saw = (run_ranks(2, lambda c, s=s: results(c, s)) for s in (True, False))  # type: ignore[misc]
    np.testing.assert_equal(saw, never_saw)


def test_nonfinite_says_whether_a_link_skips_or_raises() -> None:
    x = np.ones((4, 3), np.float32) * np.arange(4, dtype="f")[:, None]
    x[0, 0] = np.inf
    model = chainer.Sequential(chainer.Sequential(L.BatchNormalization(3)))
    converted: Any = create_mnbn_model(model, SingleProcess(), nonfinite="skip")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow|invalid value", RuntimeWarning)
        nonfinite._warned_at = -math.inf
        text = "rank 0 of 1 has skipped a batch in layer 0.0,"
        with pytest.warns(RuntimeWarning, match=text) as caught:
            assert np.isnan(converted(x).array).all()
        assert caught[0].filename == __file__  # not a line of multibn's or Chainer's
        raising = MultiNodeBatchNormalization(3, SingleProcess(), nonfinite="raise")
        for link, v in ((raising, x.astype("e")), (MultiNodeBatchNormalization(3, None), x)):
            with pytest.raises(FloatingPointError, match="are not finite"):
                link(v)
