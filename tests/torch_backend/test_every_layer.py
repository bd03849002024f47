"""Every layer keeps the same promises: a table of layers, and one test for each promise.

A layer is wrapped where a call needs more than an input, so all of them map `(N, 3, 5)` to a
tensor of the same shape, sample by sample.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from multibn import SingleProcess, torch_backend
from multibn import torch_backend as tb
from multibn.torch_backend.layer.base import SyncNormBase
from tests.helpers.ranks import CountingCommunicator, run_ranks
from tests.torch_backend.convert.test_class_swap import Activated, Copied
from tests.torch_backend.steps import checkpointed, step

NEEDS = "torch"

C, L = 3, 5
LOCAL = SingleProcess()


class Masked(nn.Module):
    """Elements with a large first channel do not count."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        if not isinstance(x, Tensor) or x.is_sparse or not x.is_floating_point() or not x.numel():
            return self.norm(x, mask=torch.ones(len(x), L, dtype=torch.bool, device="cpu"))
        return self.norm(x, mask=x.detach()[:, 0] < 1)


class OfSamples(nn.Module):
    """A norm of samples, of which there is one for each place along L; ranks have parts along N."""

    def __init__(self, norm: Any, process_group: Any, **options: Any) -> None:
        super().__init__()
        self.norm = norm
        norm.configure(process_group)  # the options are batch norm's

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.permute(2, 1, 0)).permute(2, 1, 0)


def _split(layer: nn.Module, **options: Any) -> Any:
    converted: Any = tb.convert_sub_batchnorm(layer, 2)
    converted.configure(**options)
    return converted


LAYERS: dict[str, Callable[..., Any]] = {
    "sync": lambda **options: tb.SyncBatchNorm(C, **options),
    "fused ReLU": lambda **options: tb.SyncBatchNorm(C, fuse_relu=True, **options),
    "cumulative": lambda **options: tb.SyncBatchNorm(C, momentum=None, **options),
    "naive": lambda **options: tb.NaiveSyncBatchNorm1d(num_features=C, **options),
    "sub": lambda **options: tb.SubBatchNorm1d(2, C, **options),
    "derived": lambda **options: tb.convert_sync_batchnorm(Activated(C), **options),
    "derived with the function": lambda **options: tb.convert_sync_batchnorm(Copied(C), **options),
    "split": lambda **options: _split(nn.BatchNorm1d(C), **options),
    "derived and split": lambda **options: _split(Activated(C), **options),
    "masked": lambda **options: Masked(tb.SyncBatchNorm(C, **options)),
    "masked and split": lambda **options: Masked(_split(nn.BatchNorm1d(C), **options)),
    "renorm": lambda **options: tb.SyncBatchRenorm1d(
        C, rmax=1.5, dmax=0.3, schedule=(0, 0, 1), **options
    ),
    "group": lambda **options: OfSamples(tb.SyncGroupNorm(1, C), **options),
    "instance": lambda **options: OfSamples(tb.SyncInstanceNorm1d(C, affine=True), **options),
}
OF_SAMPLES = {"group": 1, "instance": C}  # the groups of those that share in evaluation, too
# By tests/engine/test_every_option.py; the naive layer has the code of the first.
COMPILED = {"sync", "fused ReLU", "cumulative", "naive"}
every_layer = pytest.mark.parametrize("name", LAYERS)
every_sharing_layer = pytest.mark.parametrize("name", [n for n in LAYERS if "split" not in n])


def test_each_public_layer_has_a_row() -> None:
    kinds = [v for v in vars(torch_backend).values() if isinstance(v, type)]
    public = {re.sub(r"\dd$", "", v.__name__) for v in kinds if issubclass(v, SyncNormBase)}
    parts = [m for n in LAYERS for m in LAYERS[n](process_group=LOCAL).modules()]
    rows = {re.sub(r"\dd$", "", type(m).__name__) for m in parts}
    assert public <= rows, f"LAYERS of test_every_layer.py must have a row of {public - rows}"


def make(name: str, process_group: Any = LOCAL, dtype: Any = torch.float64, **options: Any) -> Any:
    """The layer, with parameters that no test can mistake for the identity."""
    layer = LAYERS[name](process_group=process_group, **options).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            values = [1.5, -0.5, 1.0] if parameter_name.endswith("weight") else [0.5, 0.1, -1.0]
            parameter.copy_(torch.tensor(values, dtype=torch.float64))
    return layer


def norms(model: nn.Module) -> list[Any]:
    """The layers of this package in a model."""
    return [m for m in model.modules() if hasattr(m, "weighting")]


def batch(n: int = 4, seed: int = 0, dtype: Any = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, C, L, generator=generator, dtype=torch.float64).to(dtype)


def weights(like: Tensor, seed: int = 9) -> Tensor:
    """Weights of a loss: no zero, so that no wrong gradient is multiplied away."""
    return batch(len(like), seed, like.dtype)


def train(run: Any, layer: Any, x: Tensor, steps: int = 2) -> list[Tensor]:
    """Outputs, gradients and state of training steps, and an evaluation."""
    results: list[Any] = []
    for _ in range(steps):
        results += step(run, x, weights(x), layer.parameters())
    layer.eval()
    results.append(run(x).detach())
    layer.train()
    return [*results, *layer.state_dict().values()]


@every_layer
def test_a_step_of_several_batches_moves_statistics_as_one_batch(name: str) -> None:
    """Elements that count move them; split k of the step is split k of all batches."""
    layer, whole = (make(name, running_var="unbiased_local") for _ in "ab")
    parts = [batch(n, seed) for seed, n in enumerate((4, 2, 6))]
    with tb.step_statistics(layer):
        for x in parts:
            layer(x)
    whole(torch.cat(parts))
    torch.testing.assert_close(layer.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)


@every_layer
def test_a_recomputed_layer_is_counted_once(name: str) -> None:
    """The numbers of the stored run, bit for bit, with no message more."""
    results = []
    for again in (False, True):
        counting = CountingCommunicator(LOCAL)
        layer = make(name, process_group=counting)
        run = partial(checkpointed, layer) if again else layer
        results.append((train(run, layer, batch()), counting.take()))
    (expected, messages), (found, others) = results
    # Two steps, of two parts, and perhaps an evaluation.
    assert len(messages) == (8 if "split" in name else 4) + (name in OF_SAMPLES)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert others == messages


@every_layer
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("foreign", [True, False])
def test_selective_checkpointing_sees_no_operation(name: str, outer: bool, foreign: bool) -> None:
    """Torch counts the operations that it saves, and a layer that runs again has others."""
    aten = torch.ops.aten
    saved = [aten.mul.Tensor, aten.add.Tensor, aten.clone.default]

    @contextlib.contextmanager
    def both(one: Any, other: Any) -> Any:
        with one, other:
            yield

    def contexts() -> Any:
        pairs = tb.checkpoint_contexts(), create_selective_checkpoint_contexts(saved)
        return [both(*each) for each in zip(*(pairs if outer else pairs[::-1]), strict=True)]

    def results(call: Callable[..., Any]) -> Any:
        layer = nn.Sequential(make(name), nn.BatchNorm1d(C, dtype=torch.float64))[: 1 + foreign]
        block = lambda x: (layer(x.clone()).mul(2) + 1).clone().exp()  # noqa: E731
        return train(lambda x: call(block, x) if layer.training else block(x), layer, batch())

    found = results(partial(checkpoint, use_reentrant=False, context_fn=contexts))
    expected = results(lambda block, x: block(x))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def functional(layer: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """The layer as a function of the input and its parameters."""
    names = [n for n, _ in layer.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return function, [p.detach().clone().requires_grad_() for p in layer.parameters()]


# Those of renormalization stop at r and d, by definition.
@pytest.mark.parametrize("name", [n for n in LAYERS if n != "renorm"])
def test_derivatives_of_both_orders_equal_finite_differences(name: str) -> None:
    function, parameters = functional(make(name))
    x = batch(seed=3)[:, :, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters), weights(x)[:, :, :2].clone())


@every_layer
def test_create_graph_changes_no_first_gradient(name: str) -> None:
    """Also where a parameter is reached through the input: a layer that is used twice."""
    function, parameters = functional(make(name))
    x = batch().requires_grad_()
    y = function(torch.tanh(function(x, *parameters)), *parameters)
    inputs = [x, *parameters]
    plain = torch.autograd.grad(y, inputs, weights(y), retain_graph=True)
    with_graph = torch.autograd.grad(y, inputs, weights(y), create_graph=True)
    torch.testing.assert_close(plain, with_graph)


# A class with a forward pass of its own evaluates by torch's, which says that the statistics moved.
@pytest.mark.parametrize("name", [n for n in LAYERS if "derived" not in n])
def test_a_pass_in_training_leaves_the_gradient_of_one_in_evaluation(name: str) -> None:
    layer = make(name)
    alone, x, later = copy.deepcopy(layer), batch().requires_grad_(), batch(seed=1)
    y = layer.eval()(x)
    layer.train()(later)
    y.backward(weights(y))
    expected = batch().requires_grad_()
    alone.eval()(expected).backward(weights(y))
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)


@every_sharing_layer
def test_a_step_is_one_message_each_way_and_evaluation_none(name: str) -> None:
    def run(communicator: Any) -> list[list[int]]:
        counting = CountingCommunicator(communicator)
        layer, x, sent = make(name, process_group=counting), batch().requires_grad_(), []
        layer(x)  # the first step sends what the layer is, too
        counting.take()
        for training in (True, False):
            y = layer.train(training)(x)
            sent.append(counting.take())
            y.sum().backward()
            sent.append(counting.take())
        layer.train()(x.detach()).sum().backward()  # whose data need no gradient
        return [*sent, counting.take()]

    size = 2 * (L * OF_SAMPLES[name] if name in OF_SAMPLES else 2 * C if name == "sub" else C) + 4
    both = [[size], [size - 2]]
    evaluation = both if name in OF_SAMPLES else [[], []]
    assert run_ranks(2, run) == [[*both, *evaluation, [size]]] * 2


@every_layer
def test_an_empty_batch_changes_nothing(name: str) -> None:
    layer, x = make(name), batch(0).requires_grad_()
    layer(batch())
    state = copy.deepcopy(layer.state_dict())
    for training in (True, False):
        y = layer.train(training)(x)
        assert y.shape == x.shape
        y.sum().backward()
    assert not any(p.grad.any() for p in layer.parameters())
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2, 4), (0, 4, 2), (8, 0)], ids=str)
@every_sharing_layer
def test_ranks_are_one_process_on_the_whole_batch(name: str, sizes: tuple[int, ...]) -> None:
    """Outputs, gradients of first and second order, and the state."""
    parts = [batch(n, rank) + rank for rank, n in enumerate(sizes)]
    whole_weights = [weights(x, 20 + rank) for rank, x in enumerate(parts)]

    def derivatives(layer: Any, x: Tensor, w: Tensor) -> list[Any]:
        inputs = [x.clone().requires_grad_(), *layer.parameters()]
        y = layer(inputs[0])
        first = torch.autograd.grad(y, inputs, w, create_graph=True)
        # The gradients of parameters are local: their squares would not add up over ranks.
        second = torch.autograd.grad(first[0].pow(3).sum() + first[1].sum(), inputs[0])
        return [[y.detach(), first[0].detach(), *second], first[1:], layer.state_dict()]

    layer = make(name)
    expected = derivatives(layer, torch.cat(parts), torch.cat(whole_weights))
    ranks = run_ranks(
        len(sizes),
        lambda c: derivatives(make(name, process_group=c), parts[c.rank], whole_weights[c.rank]),
    )
    for k, values in enumerate(expected[0]):
        got = torch.cat([r[0][k] for r in ranks])
        torch.testing.assert_close(got, values, rtol=1e-9, atol=1e-9)
    for k, values in enumerate(expected[1]):
        torch.testing.assert_close(sum(r[1][k] for r in ranks), values, rtol=1e-9, atol=1e-9)
    for _, _, state in ranks:
        torch.testing.assert_close(state, expected[2], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo itself
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {"running_var": "unbiased_local"}) for name in LAYERS if name not in COMPILED),
        ("sync", {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_one_compiled_graph_gives_eager_numbers(name: str, options: dict[str, Any]) -> None:
    dtype = options.get("dtype", torch.float64)
    layer, eager = (make(name, **{"dtype": dtype} | options) for _ in range(2))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, bound = batch(dtype=dtype), max(1e-9, 2 * torch.finfo(dtype).eps)
    found, expected = train(compiled, layer, x), train(eager, eager, x)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in LAYERS
        if "mask" in inspect.signature(LAYERS[name](process_group=LOCAL).forward).parameters
        if "split" not in name  # whose statistics are not those of all elements that count
    ],
)
def test_elements_that_do_not_count_take_no_part(name: str, residual: bool, last: bool) -> None:
    layer, plain = make(name), make(name)
    mask = torch.arange(L) < torch.tensor([5, 2, 0, 4])[:, None]
    x = torch.where(mask[:, None], batch() + 3, torch.nan)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x

    def chosen(x: Tensor) -> Tensor:
        return x.detach().movedim(1, -1)[mask]

    for training in (True, True, False):
        layer.train(training), plain.train(training)
        given = [x.clone().requires_grad_(), (2 * x).requires_grad_()][: 1 + residual]
        flat = [chosen(t)[:, :, None].requires_grad_() for t in given]
        y, expected = layer(*given, mask=mask), plain(*flat)
        dy = weights(y)
        y.backward(dy)
        assert y.stride() == x.stride() or not training
        expected.backward(chosen(dy)[:, :, None])
        compared = [(y, expected), *((t.grad, f.grad) for t, f in zip(given, flat, strict=True))]
        for values, right in compared:
            torch.testing.assert_close(chosen(values), right.detach()[:, :, 0])
            assert not values.movedim(1, -1)[~mask].any()
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    for got, want in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_layer
def test_16_bits_have_the_numbers_of_wide_arithmetic(name: str, dtype: torch.dtype) -> None:
    for kind in ("input", "autocast", "model"):
        narrow = dtype if kind == "model" else torch.float32
        layer = make(name, dtype=narrow)
        wide = copy.deepcopy(layer).double()
        x = batch(1024, dtype=dtype)  # more elements than float16 can count
        with torch.autocast("cpu", dtype, enabled=kind == "autocast"):
            for training in (True, False):
                t, exact = x.clone().requires_grad_(), x.double().requires_grad_()
                y, expected = layer.train(training)(t), wide.train(training)(exact)
                assert y.dtype == dtype, kind
                layer.zero_grad(), wide.zero_grad()
                y.backward(weights(y)), expected.backward(weights(y).double())
                compared = [(y, expected), (t.grad, exact.grad)]
                pairs = zip(layer.parameters(), wide.parameters(), strict=True)
                compared += [(a.grad, b.grad) for a, b in pairs]
                # A ReLU may see another sign of an element: errors are of all of them together.
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in compared]
                bound = 0.06 if dtype == torch.float16 else 0.1
                assert max(errors) < bound, (kind, training, errors)
                assert t.grad is not None
                assert t.grad.dtype == dtype
        assert {p.grad.dtype for p in layer.parameters()} == {narrow}
        for got, want in zip(layer.buffers(), wide.buffers(), strict=True):
            assert got.dtype == (narrow if want.is_floating_point() else torch.int64)
            torch.testing.assert_close(got.double(), want.double(), rtol=0.01, atol=0.01)
