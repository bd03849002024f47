"""torch.func and forward mode in one process: all that nn.BatchNorm1d can do in training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from multibn.engine import recompute
from multibn.torch_backend import SubBatchNorm1d, SyncBatchNorm, sync_batch_norm
from tests.helpers.ranks import EqualRanks

NEEDS = "torch"

# torch's own warnings: when it loads the formulas of forward mode, and in linearize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning"),
]

N, C = 6, 3


def _tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, V, DY = (_tensor(N, C, seed=seed) for seed in range(3))
XS = torch.stack([X, 2 * X + V, DY])


def _with_parameters(layer: Any) -> Any:
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(_tensor(*p.shape, seed=10 + i))
    return layer


class _Subject:
    """A layer as functions of its input and of its parameters."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.layer = _with_parameters(make())
        self.parameters = dict(self.layer.named_parameters())
        self.tangents = {k: torch.ones_like(p) for k, p in self.parameters.items()}

    def call(self, parameters: Any) -> Any:
        return functional_call(self.layer, parameters, (X,))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).tanh() * DY).sum()

    def loss_of(self, parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return (functional_call(self.layer, parameters, (x,)).tanh() * DY).sum()


def _dual(s: _Subject) -> Any:
    with forward_ad.dual_level():
        parameters = {k: forward_ad.make_dual(p, s.tangents[k]) for k, p in s.parameters.items()}
        y = functional_call(s.layer, parameters, (forward_ad.make_dual(X, V),))
        return tuple(forward_ad.unpack_dual(y)), dict(s.layer.named_buffers())


def _backward_of_a_dual(s: _Subject) -> Any:
    leaf = X.clone().requires_grad_()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(leaf, V)
        (dx,) = torch.autograd.grad(s.loss(x), x, create_graph=True)
        return tuple(forward_ad.unpack_dual(dx))


def _dual_gradient(s: _Subject) -> Any:
    """Only the backward pass is in forward mode."""
    leaf = X.clone().requires_grad_()
    y = s.layer(leaf)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, leaf, forward_ad.make_dual(DY, V))
        return tuple(forward_ad.unpack_dual(dx))


def _batched_gradients(layer: Any, *, by_vmap: bool) -> Any:
    leaf, dys = X.clone().requires_grad_(), torch.stack([DY, V])
    y, inputs = layer(leaf), [leaf, *layer.parameters()]
    if by_vmap:
        return vmap(lambda dy: torch.autograd.grad(y, inputs, dy, retain_graph=True))(dys)
    return torch.autograd.grad(y, inputs, dys, is_grads_batched=True)


def _of_models(s: _Subject) -> Any:
    """A network with the layer, and so many such networks at a time."""
    models = []
    for seed in range(4):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(C, C), s.make(), nn.Linear(C, 2)).double())
    parameters, buffers = stack_module_state(models)

    def call(p: Any, b: Any, x: torch.Tensor) -> Any:
        return functional_call(models[0], (p, b), (x,))

    of_one: Any = {"in_dims": (0, 0, None)}
    same = vmap(call, **of_one)(parameters, buffers, X)
    own = vmap(call)(parameters, buffers, _tensor(4, N, C, seed=3))
    gradients = vmap(grad(lambda *a: call(*a).tanh().sum()), **of_one)(parameters, buffers, X)
    return same, own, gradients, buffers


functional = torch.autograd.functional

#: The cases in which the layer's buffers are changed by the rules of torch, or not at all.
TRACKED: dict[str, Callable[[_Subject], Any]] = {
    "forward mode": _dual,
    "backward of a dual": _backward_of_a_dual,
    "dual gradient": _dual_gradient,
    "vmap of autograd.grad": lambda s: _batched_gradients(s.layer, by_vmap=True),
    "is_grads_batched": lambda s: _batched_gradients(s.layer, by_vmap=False),
    "vectorized jacobian": lambda s: functional.jacobian(s.layer, X, vectorize=True),
    "forward jacobian": lambda s: functional.jacobian(
        s.layer, X, vectorize=True, strategy="forward-mode"
    ),
    "vectorized hessian": lambda s: functional.hessian(s.loss, X, vectorize=True),
    "models": _of_models,
    "linearize": lambda s: linearize(s.layer, X)[1](V),
}
CASES: dict[str, Callable[[_Subject], Any]] = {
    **TRACKED,
    "grad": lambda s: grad(s.loss)(X),
    "grad of parameters": lambda s: grad(s.loss_of)(s.parameters, X),
    "vjp": lambda s: vjp(s.layer, X)[1](DY),
    "vjp of parameters": lambda s: vjp(s.call, s.parameters)[1](DY),
    "jvp": lambda s: jvp(s.layer, (X,), (V,)),
    "jvp without grad": lambda s: torch.no_grad()(jvp)(s.layer, (X,), (V,)),
    "jvp of parameters": lambda s: jvp(s.call, (s.parameters,), (s.tangents,)),
    "jacrev": lambda s: jacrev(s.layer)(X),
    "jacfwd": lambda s: jacfwd(s.layer)(X),
    "hessian": lambda s: hessian(s.loss)(X),
    "hessian of parameters": lambda s: hessian(s.loss_of)(s.parameters, X),
    "functionalize": lambda s: functionalize(s.layer)(X),
    "vmap": lambda s: vmap(s.layer)(XS),
    "vmap over the last axis": lambda s: vmap(s.layer, in_dims=2, out_dims=1)(XS.movedim(0, 2)),
}


class _Splits(nn.BatchNorm1d):
    """What `SubBatchNorm1d` of two splits computes without running statistics."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(_Splits, self).forward(input[k::2]) for k in (0, 1)], 1).flatten(
            0, 1
        )


class _Formula(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        d = input - input.mean(0)
        return d / ((d * d).mean(0) + self.eps).sqrt() * self.weight + self.bias


#: Layers, and the layers that they are compared with.
LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sync": (SyncBatchNorm, nn.BatchNorm1d),
    "sub": (lambda n, **o: SubBatchNorm1d(2, n, **o), _Splits),
}


def _subjects(layer: str, **options: Any) -> list[_Subject]:
    return [_Subject(partial(make, C, dtype=torch.float64, **options)) for make in LAYERS[layer]]


def _assert_equal(actual: Any, expected: Any) -> None:
    leaves = [
        [t.detach() for t in pytree.tree_leaves(v) if isinstance(t, torch.Tensor)]
        for v in (actual, expected)
    ]
    assert leaves[0]
    torch.testing.assert_close(*leaves, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_untracked_layers_equal_torchs(case: str, layer: str) -> None:
    ours, theirs = _subjects(layer, track_running_stats=False)
    _assert_equal(CASES[case](ours), CASES[case](theirs))


@pytest.mark.parametrize("case", TRACKED)
def test_tracked_layers_update_buffers_like_torchs(case: str) -> None:
    """Where torch's layer can update its buffers, ours has the same values in them."""
    results = []
    for subject in _subjects("sync"):
        results.append([CASES[case](subject), subject.layer.state_dict()])
    _assert_equal(*results)


def test_stacked_models_keep_cumulative_averages() -> None:
    """torch's layer cannot do this: it looks at the number of batches."""
    layers = [SyncBatchNorm(C, momentum=None, dtype=torch.float64) for _ in XS]
    parameters, buffers = stack_module_state(layers)
    for xs in (XS, XS + V):
        vmap(lambda p, b, x: functional_call(layers[0], (p, b), (x,)))(parameters, buffers, xs)
        for layer, x in zip(layers, xs, strict=True):
            layer(x)
    _assert_equal(buffers, stack_module_state(layers)[1])


def test_third_order_equals_the_formula() -> None:
    """nn.BatchNorm1d's third derivatives are wrong: its second take the variance as a constant."""

    def third(layer: Any) -> Any:
        subject = _Subject(lambda: layer(C, dtype=torch.float64, track_running_stats=False))
        return grad(lambda x: (jvp(grad(subject.loss), (x,), (V,))[1] * DY).sum())(X)

    _assert_equal(third(SyncBatchNorm), third(_Formula))


def test_a_fused_relu_and_residual_equal_separate_ones() -> None:
    layer = SyncBatchNorm(C, dtype=torch.float64, track_running_stats=False, fuse_relu=True)
    plain = nn.BatchNorm1d(C, dtype=torch.float64, track_running_stats=False)
    for transform in (
        lambda f: jvp(f, (X, V), (DY, X)),
        lambda f: jacrev(f, argnums=(0, 1))(X, V),
        lambda f: vmap(f, in_dims=(None, 0))(X, XS),
    ):
        _assert_equal(transform(layer), transform(lambda x, r: torch.relu(plain(x) + r)))


def test_a_bias_alone_can_be_mapped() -> None:
    def function(b: torch.Tensor) -> torch.Tensor:
        return sync_batch_norm(X, None, b)[0]

    _assert_equal(vmap(function)(X), torch.stack([function(b) for b in X]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_equal_wide_arithmetic(dtype: torch.dtype) -> None:
    x, v = X.to(dtype), V.to(dtype)
    layer = SyncBatchNorm(C, dtype=dtype, track_running_stats=False)
    wide = SyncBatchNorm(C, dtype=torch.float64, track_running_stats=False)
    actual = jvp(layer, (x,), (v,))
    expected = [t.to(dtype) for t in jvp(wide, (x.double(),), (v.double(),))]
    torch.testing.assert_close([*actual], expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_evaluation_takes_unlike_dtypes() -> None:
    """Input and parameters of unlike dtypes, which torch's layer does not take."""
    layer, wide = (
        SyncBatchNorm(C, dtype=d).eval().requires_grad_(False)
        for d in (torch.float32, torch.float64)
    )

    def dual(f: Any) -> Any:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(X, V))))

    for transform in (
        dual,
        lambda f: jvp(f, (X,), (V,)),
        lambda f: vmap(f)(XS),
        lambda f: jacrev(f)(X),
    ):
        _assert_equal(transform(layer), transform(wide))


def test_a_pass_that_runs_again_goes_along_its_tape() -> None:
    """The tape has no derivatives, so that the pass computes its statistics anew."""
    layer = SyncBatchNorm(C, dtype=torch.float64)
    with recompute.recording() as tape, forward_ad.dual_level():
        first = forward_ad.unpack_dual(layer(forward_ad.make_dual(X, V)))
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    with recompute.replaying(tape), forward_ad.dual_level():
        again = forward_ad.unpack_dual(layer(forward_ad.make_dual(X, V)))
    _assert_equal(tuple(again), tuple(first))
    _assert_equal(layer.state_dict(), state)


def test_invalid_values_are_errors_under_vmap() -> None:
    layer = SyncBatchNorm(C, dtype=torch.float64, track_running_stats=False)
    for wrong, kind, message in (
        (XS[:, :, :2], ValueError, "must have 3 channels"),
        (XS.long(), TypeError, "real floating-point dtype"),
        (XS[:, :1], ValueError, "need more than 1 value per channel"),
        (torch.stack([X, X / 0]), FloatingPointError, "not finite"),
    ):
        with pytest.raises(kind, match=message):
            vmap(layer)(wrong)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda layer: vmap(layer)(XS),
    "grad": lambda layer: grad(lambda x: layer(x).sum())(X),
    "jvp": lambda layer: jvp(layer, (X,), (V,)),
    "linearize": lambda layer: linearize(layer, X),
    "vectorized jacobian": lambda layer: functional.jacobian(layer, X, vectorize=True),
    "forward jacobian": lambda layer: functional.jacobian(
        layer, X, vectorize=True, strategy="forward-mode"
    ),
    "is_grads_batched": lambda layer: _batched_gradients(layer, by_vmap=False),
    "make_fx": lambda layer: make_fx(layer)(X),
}


@pytest.mark.parametrize("case", REFUSED)
def test_several_ranks_refuse_transforms(case: str) -> None:
    """And the layer works on."""
    layer = SyncBatchNorm(C, dtype=torch.float64, process_group=EqualRanks())
    message = "supported only in one process: got 2 ranks that"
    with pytest.raises(NotImplementedError, match=message):
        REFUSED[case](layer)
    layer(X.clone().requires_grad_()).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks itself
def test_a_transform_in_compiled_code_gives_eager_numbers() -> None:
    """torch.compile runs the layer without compilation there, as operators have no tangents."""
    layer = SyncBatchNorm(C, dtype=torch.float64, track_running_stats=False)

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return jvp(layer, (x,), (V,))[1]

    _assert_equal(torch.compile(tangent, backend="eager")(X), tangent(X))
