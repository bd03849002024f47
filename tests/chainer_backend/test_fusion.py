"""The link with a ReLU, and with an addition before, equals the link and Chainer's functions."""

from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from multibn.chainer_backend import MultiNodeBatchNormalization

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

C, SHAPE = 3, (4, 3, 5)
LENGTHS = np.asarray([5, 2, 0, 4])


def link_of(**options: Any) -> Any:
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=C) for name in ("initial_gamma", "initial_beta")}
    parameters: Any = {
        name: None if options.get(name.replace("initial", "use")) is False else value
        for name, value in drawn.items()
    }
    return MultiNodeBatchNormalization(
        C, SingleProcess(), dtype=np.float64, **parameters, **options
    )


def run(link: Any, separate: bool, add: bool, relu: bool, second: bool, **on: Any) -> list[Any]:
    """A step by the link and, if `separate`, Chainer's functions: output, gradients, averages."""
    rng = np.random.default_rng(1)
    x, residual = (chainer.Variable(rng.normal(size=SHAPE)) for _ in range(2))
    dy = chainer.Variable(rng.normal(size=SHAPE))
    if separate:
        y = link(x, **on)
        y = y + residual if add else y
        y = F.relu(y) if relu else y
        if "lengths" in on:
            y = F.where(np.broadcast_to(np.arange(5) < LENGTHS[:, None, None], SHAPE), y, 0 * y)
    else:
        y = link(x, residual=residual if add else None, **on)
    sources = [v for v in (x, residual if add else None, link.gamma, link.beta) if v is not None]
    grads = chainer.grad([y], sources, [dy], enable_double_backprop=second)
    if second:
        grads += chainer.grad([F.sum(g * g * g) for g in grads[:2]], [x, dy])
    return [v.array for v in (y, *grads)] + [link.avg_mean, link.avg_var]


@pytest.mark.parametrize("add, relu", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("second", [False, True], ids=["first order", "second order"])
@pytest.mark.parametrize(
    "on, options",
    [({}, {}), ({"lengths": LENGTHS}, {}), ({}, {"use_gamma": False}), ({}, {"use_beta": False})],
    ids=["all", "lengths", "beta alone", "gamma alone"],
)
def test_a_fused_step_gives_the_numbers_of_separate_functions(
    add: bool, relu: bool, second: bool, on: Any, options: Any
) -> None:
    expected = run(link_of(**options), True, add, relu, second, **on)
    actual = run(link_of(fuse_relu=relu, **options), False, add, relu, second, **on)
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_have_the_dtypes_of_their_parameters() -> None:
    """A residual in half precision is the node's last input."""
    link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float32, fuse_relu=True)
    x, residual = (chainer.Variable(np.ones(SHAPE, np.float16)) for _ in range(2))
    y = link(x, residual=residual)
    F.sum(y * y).backward(enable_double_backprop=True)
    assert link.gamma.grad.dtype == link.beta.grad.dtype == np.float32
    assert x.grad.dtype == residual.grad.dtype == np.float16


def test_fused_evaluation_equals_separate_functions() -> None:
    results = []
    with chainer.using_config("train", False):
        for separate in (True, False):
            link = link_of(fuse_relu=not separate)
            link.avg_var[...] = 2.0
            results.append(run(link, separate, True, True, False))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize(
    "residual, error, message",
    [
        (np.zeros((4, 3, 1)), ValueError, r"the shape and dtype of the input, \(4, 3, 5\) and flo"),
        (np.zeros(SHAPE, "f"), ValueError, r"got \(4, 3, 5\) and float32"),
        (1.0, TypeError, "`residual` must be a Variable or an array: got float"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(residual: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        link_of()(np.zeros(SHAPE), residual=residual)


def test_the_node_has_what_an_exporter_reads_or_says_why_not() -> None:
    """onnx_chainer knows the node by Chainer's name, and reads `axis` and `eps` in training."""
    x = np.random.default_rng(0).normal(size=(4, C, 5)).astype("f")
    link = MultiNodeBatchNormalization(C, None, eps=0.1)
    node = link(x).creator_node
    assert (type(node).__name__, node.axis, node.eps) == ("BatchNormalization", (0, 2), 0.1)
    fused = MultiNodeBatchNormalization(C, None, fuse_relu=True)
    for y in (fused(x), link(x, residual=x), link(x, lengths=np.full(4, 3))):
        with pytest.raises(NotImplementedError, match=r"a ReLU inside\. Export .* train=False"):
            y.creator_node.axis  # noqa: B018
