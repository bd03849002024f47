"""torch.func and forward mode over ranks: the numbers of one process on the whole batch.

Each rank transforms its own function of its own part. A derivative by the input or the parameters
of a rank is that of all ranks' outputs together, as an ordinary gradient is; a tangent of the
output has the tangents of all ranks' inputs in it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from multibn.communicators import Communicator
from multibn.torch_backend import SyncBatchNorm
from tests.harness.runs import on
from tests.torch_backend.layer.stacked import C, stack_models

RUNS = on("torchrun", 2, needs="torch")


@contextmanager
def _loading_forward_mode() -> Iterator[None]:
    """Without the warning that torch gives when it loads the formulas of forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        yield


def _tensors(world: Communicator, *shape: int, seed: int) -> list[torch.Tensor]:
    """All ranks' tensors of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(world.size)]


def _uneven(world: Communicator, seed: int) -> list[torch.Tensor]:
    """All ranks' parts of a batch, of 2, 4, 6 ... samples."""
    parts = _tensors(world, 2 * world.size, C, seed=seed)
    return [part[: 2 * rank + 2] for rank, part in enumerate(parts)]


def _layers(world: Communicator, **options: Any) -> tuple[Any, Any]:
    options = {"dtype": torch.float64, "track_running_stats": False, **options}
    layers = SyncBatchNorm(C, process_group=world, **options), nn.BatchNorm1d(C, **options)
    for layer in layers:
        with torch.no_grad():
            for i, p in enumerate(layer.parameters()):
                p.add_(torch.arange(C) * (i + 1) / 10)
    return layers


def _loss(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of each rank; the ranks' losses add up to that of the whole batch."""
    return (layer(x).tanh() * x.sin()).sum()


def _assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@_loading_forward_mode()
def check_products_are_those_of_the_whole_batch(world: Communicator) -> None:
    """vjp, grad, jvp and Hessian-vector products, over parts of unlike sizes."""
    xs, vs, dys = (_uneven(world, seed) for seed in range(3))
    rank = world.rank
    ours, theirs = _layers(world)

    def results(layer: Any, x: Any, v: Any, dy: Any) -> tuple[list[Any], list[Any]]:
        parameters = dict(layer.named_parameters())
        ones = {k: torch.ones_like(p) for k, p in parameters.items()}

        def loss(x: Any) -> Any:
            return _loss(layer, x)

        def loss_of(p: Any, x: Any) -> Any:
            return _loss(lambda x: functional_call(layer, p, (x,)), x)

        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v)))
        of_input = [
            vjp(layer, x)[1](dy)[0],
            grad(loss)(x),
            *jvp(layer, (x,), (v,)),
            *jvp(grad(loss), (x,), (v,)),
            *dual,
            jvp(loss_of, (parameters, x), (ones, v))[1].expand(len(x)),
        ]
        of_parameters = [
            *grad(loss_of)(parameters, x).values(),
            *jvp(lambda p: grad(loss_of)(p, x), (parameters,), (ones,))[1].values(),
        ]
        return of_input, of_parameters

    of_input, of_parameters = results(ours, xs[rank], vs[rank], dys[rank])
    summed = [world.allreduce(t.detach()) for t in (of_input.pop()[:1], *of_parameters)]
    expected, expected_sums = results(theirs, torch.cat(xs), torch.cat(vs), torch.cat(dys))
    expected_sums = [expected.pop()[:1], *expected_sums]
    start = sum(map(len, xs[:rank]))
    _assert_equal(of_input, [t[start : start + len(xs[rank])] for t in expected])
    _assert_equal(summed, expected_sums)


@_loading_forward_mode()
def check_jacobians_are_those_of_the_whole_batch(world: Communicator) -> None:
    xs = torch.stack(_tensors(world, 4, C, seed=0))
    us = torch.stack(_tensors(world, 5, 4, C, seed=1))
    rank = world.rank
    ours, theirs = _layers(world)

    def whole(xs: torch.Tensor) -> torch.Tensor:
        return theirs(xs.flatten(0, 1)).view(xs.shape)

    def total(xs: torch.Tensor) -> torch.Tensor:
        return _loss(theirs, xs.flatten(0, 1))

    # Every rank's k-th output, or input, is varied at once.
    zero = torch.zeros_like(xs[0])
    expected = [
        jacrev(lambda xs: whole(xs).sum(0))(xs)[:, :, rank],
        jacfwd(lambda d: whole(xs + d))(zero)[rank],
        jacfwd(lambda d: grad(total)(xs + d))(zero)[rank],
        vmap(lambda u: vjp(whole, xs)[1](u)[0], in_dims=1)(us)[:, rank],
    ]
    x = xs[rank].clone().requires_grad_()
    y = ours(x)
    actual = [
        jacrev(ours)(xs[rank]),
        jacfwd(ours)(xs[rank]),
        hessian(lambda x: _loss(ours, x))(xs[rank]),
        vmap(lambda u: torch.autograd.grad(y, x, u, retain_graph=True)[0])(us[rank]),
    ]
    _assert_equal(actual, expected)


def check_stacked_models_are_those_of_the_whole_batch(world: Communicator) -> None:
    xs = _tensors(world, 4, C, seed=0)
    results = []
    for k, x in ((0, xs[world.rank]), (1, torch.cat(xs))):

        def make_layer(k: int = k) -> Any:
            return _layers(world, track_running_stats=True)[k]

        model, parameters, buffers = stack_models(3, make_layer)

        def call(p: Any, b: Any, net: Any = model, x: torch.Tensor = x) -> Any:
            return functional_call(net, (p, b), (x,))

        y = vmap(call)(parameters, buffers)

        def loss(p: Any, b: Any, call: Any = call) -> Any:
            return call(p, b).tanh().sum()

        gradients = vmap(grad(loss))(parameters, buffers)
        results.append([y, gradients, buffers])
    (y, gradients, buffers), (whole, expected, expected_buffers) = results
    gradients = {k: world.allreduce(v.detach()) for k, v in gradients.items()}
    _assert_equal(y, whole[:, 4 * world.rank : 4 * world.rank + 4])
    _assert_equal(gradients, {k: v.detach() for k, v in expected.items()})
    _assert_equal(buffers, expected_buffers)


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@_loading_forward_mode()
def check_lossy_transforms_are_refused_on_every_rank(world: Communicator) -> None:
    """Where the ranks' messages would lose numbers; the layer works on."""
    layer, _ = _layers(world)
    x = _tensors(world, 4, C, seed=0)[world.rank].requires_grad_()
    functional = torch.autograd.functional
    errors = [
        _error(lambda: functional.jacobian(layer, x, vectorize=True)),
        _error(lambda: functional.jacobian(layer, x, vectorize=True, strategy="forward-mode")),
        _error(
            lambda: torch.autograd.grad(layer(x), x, torch.ones(2, 4, C), is_grads_batched=True)
        ),
        _error(lambda: linearize(layer, x.detach())),
    ]
    layer(x).sum().backward()
    for error in errors[:3]:
        assert "NotImplementedError: `vectorize=True` in torch.autograd.functional and" in error
        assert f"got {world.size} ranks. torch hides" in error
        assert "jacrev" in error
    assert "NotImplementedError: torch.func.linearize and make_fx cannot trace" in errors[3]


@_loading_forward_mode()
def check_unlike_transforms_are_named_on_every_rank(world: Communicator) -> None:
    """One rank sends a tangent where the others send a gradient."""
    layer, _ = _layers(world)
    x = _tensors(world, 4, C, seed=0)[world.rank]
    if world.rank == 0:
        error = _error(lambda: jvp(layer, (x,), (x,)))
    else:
        error = _error(lambda: grad(lambda x: _loss(layer, x))(x))
    assert "RuntimeError: the ranks are in different places" in error
    assert "(tangent, float64, call 1)" in error
    assert "(gradient, float64, call 1)" in error
