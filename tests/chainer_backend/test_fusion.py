"""The link with a ReLU, and with an addition before: see test_second_order.py for gradients."""

from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from multibn.chainer_backend import MultiNodeBatchNormalization

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

C, SHAPE = 3, (4, 3, 5)


def link_of(**options: Any) -> Any:
    options |= {"initial_gamma": np.array([1.5, -0.5, 1]), "initial_beta": np.arange(3.0)}
    return MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float64, **options)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [None, np.asarray([5, 2, 0, 4])], ids=["all", "lengths"])
def test_a_fused_pass_equals_separate_functions(relu: bool, training: bool, lengths: Any) -> None:
    x, residual = np.random.default_rng(1).normal(size=(2, *SHAPE))
    apart, fused = link_of(), link_of(fuse_relu=relu)
    with chainer.using_config("train", training):
        expected = apart(x, lengths=lengths).array + residual
        y = fused(x, residual=residual, lengths=lengths).array
    expected = np.maximum(expected, 0) if relu else expected
    if lengths is not None:
        expected = np.where(np.arange(5) < lengths[:, None, None], expected, 0)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(fused.avg_var, apart.avg_var)


def test_gradients_have_the_dtypes_of_their_parameters() -> None:
    """A residual in half precision is the node's last input."""
    link = MultiNodeBatchNormalization(C, SingleProcess(), dtype=np.float32, fuse_relu=True)
    x, residual = (chainer.Variable(np.ones(SHAPE, np.float16)) for _ in range(2))
    y = link(x, residual=residual)
    F.sum(y * y).backward(enable_double_backprop=True)
    assert link.gamma.grad.dtype == link.beta.grad.dtype == np.float32
    assert x.grad.dtype == residual.grad.dtype == np.float16


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
