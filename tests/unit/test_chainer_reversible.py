"""Reversible blocks of Chainer links against the same blocks stored."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess
from multibn.engine import recompute
from tests.helpers import require
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

require.need("chainer")

from multibn.chainer_backend import (  # noqa: E402
    MultiNodeBatchNormalization,
    ReversibleSequence,
    forget,
)

import chainer  # noqa: E402  # isort: skip (multibn makes it importable)
from chainer import functions as F  # noqa: E402  # isort: skip
from chainer import link_hooks  # noqa: E402  # isort: skip
from chainer import links as L  # noqa: E402  # isort: skip

C = 4


def multi_node(communicator: Any) -> Any:
    return MultiNodeBatchNormalization(C, communicator)


def half(norm: Any) -> Any:
    linears = [
        L.Linear(C, C, initialW=np.random.default_rng(i).normal(0, 0.5, (C, C))) for i in (1, 2)
    ]
    return chainer.Sequential(linears[0], norm, F.tanh, linears[1])


# What F and G are made of; each makes one from the communicator.
def with_batch_norm(communicator: Any) -> Any:
    return half(multi_node(communicator))


def with_dropout(communicator: Any) -> Any:
    return chainer.Sequential(half(multi_node(communicator)), partial(F.dropout, ratio=0.4))


def with_chainers_own(_: Any) -> Any:
    return half(L.BatchNormalization(C))


def with_renormalization(_: Any) -> Any:
    return half(L.BatchRenormalization(C))


def with_spectral_normalization(_: Any) -> Any:
    function = half(F.tanh)
    function[0].add_hook(link_hooks.SpectralNormalization())
    return function


def forgetting_inside(communicator: Any) -> Any:
    norm = multi_node(communicator)
    return half(chainer.Sequential(F.sin, lambda x: forget(norm, x), norm))


def reversible_inside(communicator: Any) -> Any:
    inner = ReversibleSequence([(with_dropout(communicator), with_dropout(communicator))])
    return chainer.Sequential(lambda x: inner(x, F.sin(x))[0], inner.layers[0].F)


def of_two_blocks_deep(communicator: Any) -> Any:
    return chainer.Sequential(*(half(multi_node(communicator)) for _ in range(2)))


MADE_OF = [
    with_batch_norm,
    with_dropout,
    with_chainers_own,
    with_renormalization,
    with_spectral_normalization,
    forgetting_inside,
    reversible_inside,
    of_two_blocks_deep,
]


def sequence(make: Callable[[Any], Any], mode: Any, blocks: int, communicator: Any = None) -> Any:
    communicator = communicator or SingleProcess()
    np.random.seed(3)  # noqa: NPY002 (links draw from it)
    net = ReversibleSequence(
        [(make(communicator), make(communicator)) for _ in range(blocks)], mode=mode
    )
    net.cleargrads()  # they start as nan
    return net


def inputs(dtype: Any = np.float64, n: int = 6, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [chainer.Variable(rng.normal(size=(n, C)).astype(dtype)) for _ in range(2)]


def loss(y1: Any, y2: Any) -> Any:
    return F.sum(F.sin(y1) * y2)


def draws() -> Any:
    return np.random.rand(3)  # noqa: NPY002 (the generator that Chainer draws from)


def gradients(net: Any, xs: Any) -> dict[str, Any]:
    found = {name: p.grad for name, p in net.namedparams()}
    return found | {f"x{i}": x.grad for i, x in enumerate(xs)}


def persistents(net: Any) -> dict[str, Any]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(net)
    return dict(serializer.target)


def assert_close(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Up to `tolerance` of the norm of all gradients together; None where None is expected."""
    assert got.keys() == expected.keys()
    assert [k for k, g in got.items() if g is None] == [k for k, g in expected.items() if g is None]
    there = [k for k, g in expected.items() if g is not None]
    norm = np.sqrt(sum(float((expected[k].astype(np.float64) ** 2).sum()) for k in there))
    error = np.sqrt(
        sum(float(((got[k].astype(np.float64) - expected[k]) ** 2).sum()) for k in there)
    )
    assert norm > 0
    assert error < tolerance * norm, error / norm


def step(make: Any, mode: Any, blocks: int = 3, dtype: Any = np.float64, **options: Any) -> Any:
    """Outputs, gradients and what is kept after a step, and what is drawn after it."""
    with chainer.using_config("dtype", dtype):
        net = sequence(make, mode, blocks, **options)
        xs = inputs(dtype)
        ys = net(*xs)
        loss(*ys).backward()
    return [y.array for y in ys], gradients(net, xs), persistents(net), draws()


@pytest.mark.parametrize("make", MADE_OF)
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-13), (np.float32, 2e-6)])
def test_equals_the_stored_run(make: Any, dtype: Any, tolerance: float) -> None:
    ys, got, kept, drawn = step(make, "reversible", dtype=dtype)
    ys_stored, expected, kept_stored, drawn_stored = step(make, "stored", dtype=dtype)
    np.testing.assert_array_equal(ys, ys_stored)
    np.testing.assert_array_equal(drawn, drawn_stored)
    assert_close(got, expected, tolerance)
    assert kept.keys() == kept_stored.keys()
    for name, value in kept.items():
        np.testing.assert_array_equal(value, kept_stored[name], name)


@pytest.mark.parametrize("blocks", [1, 4])
def test_messages(blocks: int) -> None:
    """None in the recomputation, which is a part of the backward pass."""
    found = []
    for mode in ("reversible", "stored"):
        counting = CountingCommunicator(SingleProcess())
        net = sequence(with_batch_norm, mode, blocks, counting)
        y = loss(*net(*inputs(np.float32)))
        forward = counting.take()
        y.backward()
        found.append((forward, counting.take()))
        assert [len(messages) for messages in found[-1]] == [2 * blocks, 2 * blocks]
    assert found[0] == found[1]


def test_over_ranks() -> None:
    """Rank 1 has no data."""

    def rank(world: ThreadCommunicator, mode: str) -> Any:
        with chainer.using_config("dtype", np.float64):
            blocks = [(with_batch_norm(world), with_batch_norm(world)) for _ in range(3)]
            net = ReversibleSequence(blocks, mode=mode)  # type: ignore[arg-type]
            net.cleargrads()
            xs = inputs(n=0 if world.rank == 1 else 4, seed=world.rank)
            loss(*net(*xs)).backward()
        return gradients(net, xs), persistents(net)

    ranks = [run_ranks(3, partial(rank, mode=mode)) for mode in ("reversible", "stored")]
    for (got, kept), (expected, kept_stored) in zip(*ranks, strict=True):
        assert_close(got, expected, 1e-13)
        for name, value in kept.items():
            np.testing.assert_array_equal(value, kept_stored[name], name)


@pytest.mark.parametrize("device", ["@numpy", "@cupy:0"])
def test_random_numbers_are_put_back(device: str) -> None:
    """Whatever became of the generator meanwhile, the same is drawn, and the generator stays."""
    if device == "@cupy:0":
        require.need("cupy")
    random = chainer.get_device(device).xp.random
    net = sequence(with_dropout, "reversible", 2)
    net.to_device(device)
    found = []
    for between in (6, 7):
        net.cleargrads()
        xs = inputs(np.float32)
        for x in xs:
            x.to_device(device)
        random.seed(5)
        with chainer.using_config("use_cudnn", "never"):
            y = loss(*net(*xs))
        random.seed(between)
        y.backward()
        drawn = random.rand(3)
        random.seed(between)
        assert (drawn == random.rand(3)).all()
        found.append({k: chainer.cuda.to_cpu(g) for k, g in gradients(net, xs).items()})
    assert_close(found[0], found[1], 1e-6)


def two_forwards(net: Any, a: Any, b: Any) -> Any:
    first, second = net(*a), net(*b)
    return loss(*first) * loss(*second)


def one_into_the_next(net: Any, a: Any, b: Any) -> Any:
    return loss(*net(*net(*a))) + F.sum(b[0])


def the_same_input_twice(net: Any, a: Any, b: Any) -> Any:
    return loss(*net(a[0], a[0])) * F.sum(a[1] * b[0] * b[1])


def first_output_only(net: Any, a: Any, b: Any) -> Any:
    return F.sum(net(*a)[0] ** 3)


def second_output_only(net: Any, a: Any, b: Any) -> Any:
    return F.sum(net(*a)[1] ** 3)


def arrays_in(net: Any, a: Any, b: Any) -> Any:
    return loss(*net(a[0].array, a[1].array))


def forgotten(net: Any, a: Any, b: Any) -> Any:
    return loss(*forget(net, *a))


def trained_and_evaluated(net: Any, a: Any, b: Any) -> Any:
    """The backward pass comes with another flag than one of them had."""
    y = loss(*net(*a))
    with chainer.using_config("train", False):
        return y + loss(*net(*b))


CALLS = [
    two_forwards,
    one_into_the_next,
    the_same_input_twice,
    first_output_only,
    second_output_only,
    arrays_in,
    forgotten,
    trained_and_evaluated,
]


@pytest.mark.parametrize("train_in_backward", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_calls(call: Any, train_in_backward: bool) -> None:
    found = []
    # A forgotten block's drop-out is another one the second time, which is Chainer's.
    make = with_batch_norm if call is forgotten else with_dropout
    for mode in ("reversible", "stored"):
        with chainer.using_config("dtype", np.float64):
            net = sequence(make, mode, 2)
            a, b = inputs(), inputs(seed=1)
            y = call(net, a, b)
        # What forget runs again has the flag of its backward pass.
        with chainer.using_config("train", train_in_backward or call is forgotten):
            y.backward()
        found.append((gradients(net, (*a, *b)), persistents(net)))
    (got, kept), (expected, kept_stored) = found
    assert_close(got, expected, 1e-13)
    for name, value in kept.items():
        np.testing.assert_array_equal(value, kept_stored[name], name)


def test_the_last_block_has_no_part_in_its_first_stream() -> None:
    net = sequence(with_batch_norm, "reversible", 1)
    F.sum(net(*inputs(np.float32))[0] ** 2).backward()
    assert all(p.grad is None for p in net.layers[0].G.params())
    assert all(p.grad is not None for p in net.layers[0].F.params())


def test_gradients_are_added_in_each_backward_pass() -> None:
    with chainer.using_config("dtype", np.float64):
        net = sequence(with_dropout, "reversible", 2)
        xs = inputs()
        y = loss(*net(*xs))
    y.backward()
    once = gradients(net, xs)
    y.backward()
    for name, g in gradients(net, xs).items():
        np.testing.assert_allclose(g, 2 * once[name], rtol=1e-14)


@pytest.mark.parametrize("mode", ["reversible", "stored"])
def test_grad_touches_nothing_else(mode: Any) -> None:
    with chainer.using_config("dtype", np.float64):
        net = sequence(with_batch_norm, mode, 2)
        xs = inputs()
        y = loss(*net(*xs))
    wanted = [xs[1], net.layers[0].F[0].W, net.layers[1].G[1].gamma]
    got = chainer.grad([y], wanted)
    assert all(g is None for g in gradients(net, xs).values())
    y.backward()
    for v, g in zip(wanted, got, strict=True):
        np.testing.assert_allclose(g.array, v.grad, rtol=1e-10)


@pytest.mark.parametrize("how", ["copy", "share"])
def test_shared_links(how: Any) -> None:
    """Registered once, found by copies, and given the sum of the gradients."""
    found = []
    for mode in ("reversible", "stored"):
        with chainer.using_config("dtype", np.float64):
            f, g = with_dropout(SingleProcess()), with_dropout(SingleProcess())
            net: Any = ReversibleSequence([(f, g), (f, f), (g, f)], mode=mode)
            assert net.count_params() == f.count_params() + g.count_params()
            assert net.layers[0].F is f
            assert len(list(net.layers[2].params())) == 0
            net.cleargrads()
            copied = net.copy(how)
            for p in copied.params():
                p.array += 0.1
            np.random.seed(0)  # noqa: NPY002
            xs = inputs()
            loss(*copied(*xs)).backward()
        assert all(p.grad is None for p in net.params())
        found.append(gradients(copied, xs))
    assert_close(found[0], found[1], 1e-13)


def test_callables_and_what_they_use() -> None:
    found = []
    for mode in ("reversible", "stored"):
        W = chainer.Parameter(np.eye(C) + 0.3)
        unused = chainer.Parameter(np.ones(C))
        h, *xs = (*inputs(seed=1)[:1], *inputs())
        used = h * 2
        net = ReversibleSequence(
            [
                (lambda v, W=W: F.tanh(v @ W), lambda v: v),
                (
                    lambda v, used=used: F.sin(used * v),
                    lambda v, W=W: F.broadcast_to(W[0], v.shape),
                ),
                (lambda v: chainer.Variable(np.ones_like(v.array)), F.sin),
            ],
            mode=mode,
        )
        loss(*net(*xs)).backward()
        assert unused.grad is None
        assert not list(net.params())
        found.append({"W": W.grad, "h": h.grad, "x1": xs[0].grad, "x2": xs[1].grad})
    assert_close(found[0], found[1], 1e-13)


def test_streams_of_different_shapes() -> None:
    found = []
    for mode in ("reversible", "stored"):
        x1, x2 = chainer.Variable(np.ones((3, 2))), chainer.Variable(np.arange(12.0).reshape(3, 4))
        net = ReversibleSequence(
            [(lambda v: F.sin(v[:, :2]), lambda v: F.tanh(F.concat([v, v])))] * 2,
            mode=mode,
        )
        y1, y2 = net(x1, x2)
        F.sum(y1 * y2[:, 1:3]).backward()
        found.append({"x1": x1.grad, "x2": x2.grad})
    assert_close(found[0], found[1], 1e-13)


def test_links_that_wait_for_their_first_input() -> None:
    net = ReversibleSequence([(L.Linear(None, C), L.Linear(None, C))])
    optimizer = chainer.optimizers.SGD(1e-3).setup(net)
    xs = inputs(np.float32)
    before = loss(*net(*xs))
    optimizer.update(lambda: loss(*net(*xs)))
    assert float(loss(*net(*xs)).array) < float(before.array)


def test_nothing_is_noted_without_backprop() -> None:
    noted = []

    def function(v: Any) -> Any:
        noted.append(bool(chainer.config._will_recompute))
        return F.sin(v)

    net = ReversibleSequence([(function, function)])
    with chainer.no_backprop_mode():
        ys = net(*inputs())
    assert [y.creator_node for y in ys] == [None, None]
    net(*inputs())
    assert noted == [False, False, True, True]


def test_the_dtype_of_the_first_pass() -> None:
    def function(v: Any) -> Any:
        return F.cast(F.sin(F.cast(v, chainer.config.dtype)), np.float64)

    found = []
    for mode in ("reversible", "stored"):
        xs = inputs()
        with chainer.using_config("dtype", np.float16):
            y = loss(*ReversibleSequence([(function, function)] * 2, mode=mode)(*xs))
        y.backward()
        found.append({"x1": xs[0].grad, "x2": xs[1].grad})
    assert_close(found[0], found[1], 1e-6)


def test_differentiating_twice_is_an_error() -> None:
    net = sequence(with_batch_norm, "reversible", 1)
    y = loss(*net(*inputs(np.float32)))
    with pytest.raises(RuntimeError, match=r'cannot be differentiated twice.*, or mode="auto" in'):
        y.backward(enable_double_backprop=True)


def test_evaluation_is_stored_unless_asked_otherwise() -> None:
    """Second derivatives of Chainer's ordinary graph; in training the same sequence has none."""
    found = []
    for mode in ("auto", "stored"):
        net, xs = sequence(with_chainers_own, mode, 2), inputs(np.float32)
        with chainer.using_config("train", False):
            (gx,) = chainer.grad([loss(*net(*xs))], xs[:1], enable_double_backprop=True)
            F.sum(gx * gx).backward()
        found.append(gradients(net, xs))
    assert_close(found[0], found[1], 1e-12)
    net, xs = sequence(with_chainers_own, "auto", 2), inputs(np.float32)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        chainer.grad([loss(*net(*xs))], xs[:1], enable_double_backprop=True)


ROWS = 20_000
STREAM = ROWS * C * 4


def memory(mode: Any, blocks: int) -> Any:
    """Bytes held after the forward pass, and at most in the backward pass."""
    net = sequence(with_batch_norm, mode, blocks)
    xs = [np.zeros((ROWS, C), "float32") for _ in range(2)]
    loss(*net(*xs)).backward()  # everything is there that stays
    tracemalloc.start()
    try:
        y = loss(*net(*xs))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        y.backward()
        return np.array([held, tracemalloc.get_traced_memory()[1]])
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_blocks() -> None:
    """A block leaves the statistics of its channels and a few objects, a stored one activations."""
    per_block = (memory("reversible", 8) - memory("reversible", 2)) / 6 / STREAM
    stored_per_block = (memory("stored", 8) - memory("stored", 2)) / 6 / STREAM
    assert (per_block < 0.1).all(), per_block
    assert (stored_per_block > 6).all(), stored_per_block


def test_inverse() -> None:
    with chainer.using_config("dtype", np.float64):
        net = sequence(with_dropout, "reversible", 3)
        xs = inputs()
        net(*xs)
        with chainer.using_config("train", False):
            back = net.inverse(*net(*xs))
    for x, again in zip(xs, back, strict=True):
        np.testing.assert_allclose(again.array, x.array, rtol=1e-12, atol=1e-12)
        assert again.creator_node is None
    with pytest.raises(RuntimeError, match=r"`inverse` is for evaluation: got .*train = True"):
        net.inverse(*xs)


def test_names_of_parameters() -> None:
    net = ReversibleSequence([(L.Linear(2, 2), L.Bias(1, (2,))), (L.Scale(1, (2,)), F.tanh)])
    names = {name for name, _ in net.namedparams()}
    assert names == {"/layers/0/F/W", "/layers/0/F/b", "/layers/0/G/b", "/layers/1/F/W"}


def test_a_block_that_differs_is_an_error() -> None:
    link = multi_node(SingleProcess())
    calls = iter([1, 2])

    def function(v: Any) -> Any:
        for _ in range(next(calls)):
            v = link(v)
        return v

    net = ReversibleSequence([(function, F.sin)])
    y = loss(*net(*inputs(np.float32)))
    with pytest.raises(RuntimeError, match="more batch norms than the first pass, which had 1"):
        y.backward()
    assert not recompute.in_recomputing()
    assert not chainer.config.in_recomputing


@pytest.mark.parametrize(
    "blocks, mode, kind, message",
    [
        ([], "stored", ValueError, r"`blocks` must have at least one pair \(F, G\): got none"),
        ([F.sin], "stored", ValueError, r"`blocks` must be pairs \(F, G\): got <func.*for block 0"),
        ([(F.sin, F.sin), (F.sin, 3)], "stored", TypeError, "G of block 1 of `blocks`.*got int"),
        ([(F.sin, F.sin)], "kept", ValueError, "`mode` must be one of 'auto', 'reversible'"),
    ],
)
def test_bad_arguments(blocks: Any, mode: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ReversibleSequence(blocks, mode=mode)


@pytest.mark.parametrize("mode", ["reversible", "stored"])
@pytest.mark.parametrize(
    "function, kind, message",
    [
        (lambda v: v.array, TypeError, "G of block 0 must return a Variable: got ndarray"),
        (
            F.sum,
            ValueError,
            r"G of block 0 must return.*\(6, 4\) and float64: got \(\) and float64",
        ),
        (lambda v: F.cast(v, np.float32), ValueError, r"got \(6, 4\) and float32"),
    ],
)
def test_bad_functions(function: Any, kind: type[Exception], message: str, mode: Any) -> None:
    with pytest.raises(kind, match=message):
        ReversibleSequence([(F.sin, function)], mode=mode)(*inputs())
