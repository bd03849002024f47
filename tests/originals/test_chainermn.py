"""ChainerMN's trainer, and small programs, with multibn's links in place of the original ones."""

import warnings
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from multibn.chainer_backend import MultiNodeBatchNormalization
from tests.originals import chainer_programs

import chainer  # isort: skip (multibn makes it importable)
from chainer import links as L  # isort: skip

NEEDS = "chainer"


def chainers(size: int, **options: Any) -> Any:
    return L.BatchNormalization(size, initial_avg_var=0, **options)


def ours(size: int, **options: Any) -> Any:
    return MultiNodeBatchNormalization(size, SingleProcess(), **options)


@pytest.mark.parametrize("program", chainer_programs.PROGRAMS, ids=lambda p: p.__name__)
def test_programs_for_chainers_link_run_alike_with_ours(program: chainer_programs.Program) -> None:
    chainer_programs.assert_same(program(ours, 0), program(chainers, 0))


def test_a_static_graph_evaluates_but_refuses_to_train() -> None:
    """Chainer's decorator repeats functions on new arrays, not what happens between them."""

    class Net(chainer.Chain):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            with self.init_scope():
                self.norm = norm

        @chainer.static_graph(verbosity_level=0)
        def __call__(self, x: Any) -> Any:
            return self.norm(x)

    xs = [chainer.Variable(chainer_programs.batch(seed)) for seed in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with chainer.using_config("train", False):
            ys = [[net(x).array.copy() for x in xs] for net in (Net(ours(3)), Net(chainers(3)))]
        with pytest.raises(NotImplementedError, match="cannot share batch statistics inside"):
            Net(ours(3))(xs[0])
    np.testing.assert_array_equal(ys[0], ys[1])
    assert abs(ys[0][0] - ys[0][1]).min() > 0
