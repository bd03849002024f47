"""Variables in cuDNN's channels-last layout, which `compute_mode="cudnn_fast"` is for.

On the CPU, Chainer's own links take such a Variable in the forward pass of training only.
"""

from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import memory_layouts

from multibn import SingleProcess
from multibn.chainer_backend import (
    FinetunePopulationStatistics,
    MultiNodeBatchNormalization,
)

ALONE = SingleProcess()
CHANNELS_LAST = memory_layouts.CUDNN_CHANNEL_LAST_X
LAYOUTS = (None, CHANNELS_LAST)


def link(**options: Any) -> Any:
    return MultiNodeBatchNormalization(3, ALONE, dtype=np.float64, **options)


def data(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(2, 3, (4, 3, 5, 6))


def results(norm: Any, x: Any, layout: Any) -> list[Any]:
    """Output, gradients, and gradients of a gradient, of `norm` on `x` in the layout."""
    v = chainer.Variable(x)
    y = norm(v.as_layout(layout))
    assert y.layout == layout
    assert y.shape == x.shape
    y = y.as_layout(None)
    F.sum(y**3).backward(enable_double_backprop=True)
    dx = v.grad_var
    gradients = [dx.array, *(p.grad.copy() for _, p in sorted(norm.namedparams()))]
    v.cleargrad()
    norm.cleargrads()
    F.sum(dx * y).backward()
    return [y.array, *gradients, v.grad, *(p.grad for _, p in sorted(norm.namedparams()))]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("options", [{}, {"axis": (0, 2, 3)}, {"use_gamma": False}])
def test_a_link_gives_the_same_numbers_in_channels_last(
    options: dict[str, Any], is_training: bool
) -> None:
    links = [link(**options) for _ in LAYOUTS]
    for norm in links:
        norm(data(1))
    with chainer.using_config("train", is_training):
        expected, actual = (
            results(norm, data(), layout) for norm, layout in zip(links, LAYOUTS, strict=True)
        )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    for name in ("avg_mean", "avg_var"):
        np.testing.assert_allclose(getattr(links[1], name), getattr(links[0], name), rtol=1e-13)


@pytest.mark.parametrize("is_training", [True, False])
def test_no_copy_is_made(is_training: bool) -> None:
    """The array of the output is in the order of its layout, as the one of the input is."""
    raw = np.ascontiguousarray(data().transpose(0, 2, 3, 1))
    with chainer.using_config("train", is_training):
        y = link()(chainer.Variable(raw, layout=CHANNELS_LAST))
    assert y.raw_array.shape == raw.shape
    assert y.raw_array.flags.c_contiguous


class InLayout(chainer.Chain):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.norm = norm

    def forward(self, x: Any) -> Any:
        return self.norm(chainer.as_variable(x).as_layout(CHANNELS_LAST)).as_layout(None)


def test_finetuning_measures_variables_in_channels_last() -> None:
    batches = [data(seed) for seed in range(3)]
    model = InLayout(link())
    FinetunePopulationStatistics(batches, model, ALONE, converter=None, progress=False)()
    whole = np.concatenate(batches)
    np.testing.assert_allclose(model.norm.avg_mean, whole.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(model.norm.avg_var, whole.var((0, 2, 3), ddof=0), rtol=3e-3)
