"""Options of reversible blocks, and tools that look at their operations."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multibn.torch_backend.reversible import ReversibleSequence
from multibn.torch_backend.reversible.sequence import Mode
from tests.helpers.memory import count_saved
from tests.torch_backend.reversible.blocks import (
    MODES,
    Lambda,
    Mlp,
    build,
    dropout,
    error,
    expect_equal,
    expect_stored_run,
    foreign,
    inputs,
    loss_of,
    mlps,
    own,
    result,
    step,
    train,
)
from tests.torch_backend.steps import checkpointed

NEEDS = "torch"


def test_without_gradients_nothing_is_kept() -> None:
    model, xs = build("reversible"), inputs()
    expected = model(*xs)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert all(map(torch.equal, model(*xs), expected))


@pytest.mark.parametrize(
    "dtype, wide", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_wider_streams_give_the_numbers_of_the_stored_run(dtype: Any, wide: Any) -> None:
    """The recomputation then sees the numbers of the first pass, and what is left is rounding."""
    results = []
    for mode, stream_dtype in [("stored", wide), ("reversible", wide), ("reversible", None)]:
        model = build(mode, depth=12, dtype=dtype, stream_dtype=stream_dtype)  # type: ignore[arg-type]
        xs = inputs(dtype)
        ys = model(*xs)
        assert ys[0].dtype == dtype
        loss_of(*ys).backward()
        results.append(result(model, xs, ys))
    stored, wider, narrow = results
    assert all(map(torch.equal, wider.outputs, stored.outputs))
    assert all(map(torch.equal, wider.gradients, stored.gradients))  # type: ignore[arg-type]
    assert error(narrow.gradients, stored.gradients) > 0


def test_the_inverse_returns_the_inputs() -> None:
    """Also with batch norms and conditions, unequal streams, and with a gradient."""
    model = build("auto", lambda: mlps(own), drop_path=0.3).eval().requires_grad_(False)
    xs = [x.detach() for x in inputs()]
    shift = torch.randn(1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert error(model.inverse(*model(*xs, shift), shift), xs) < 1e-13
    assert error(model.inverse(*model(*xs, shift), shift + 1), xs) > 1e-3
    jacobian = torch.autograd.functional.jacobian(model.inverse, model(*xs))
    forward = torch.autograd.functional.jacobian(model, tuple(xs))
    blocks = [
        torch.cat([torch.cat([b.reshape(xs[0].numel(), -1) for b in row], 1) for row in of])
        for of in (jacobian, forward)
    ]
    torch.testing.assert_close(
        blocks[0] @ blocks[1], torch.eye(len(blocks[0]), dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_the_inverse_of_a_pass_that_drops_samples_is_refused() -> None:
    model = build("auto", drop_path=0.3)
    with pytest.raises(RuntimeError, match=r"`inverse` needs `drop_path=0` in training: G of bloc"):
        model.inverse(*inputs())


def test_copies_and_pickles_work_after_a_forward_pass() -> None:
    model = build("reversible", drop_path=0.1)
    model(*inputs())
    expected = train(copy.deepcopy(model))
    expect_equal(train(pickle.loads(pickle.dumps(model))), expected, tolerance=1e-15)
    assert {name.rpartition(".F.")[0] for name in model.state_dict() if ".F." in name} == {
        f"layers.{i}" for i in range(3)
    }


def test_options_that_do_not_fit_are_refused() -> None:
    blocks = [mlps()]
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="`drop_path` must have a probability for each of the 1 b"):
        ReversibleSequence(blocks, drop_path=[0.1, 0.1])
    message = "`stream_dtype` must be a floating-point dtype, or None: g"
    with pytest.raises(TypeError, match=message):
        ReversibleSequence(blocks, stream_dtype=torch.int64)
    with pytest.raises(TypeError, match=r"must be floating-point tensors: got torch.int64, torch"):
        ReversibleSequence(blocks)(x.long(), x.long())
    with pytest.raises(ValueError, match=r"F of block 0 must return the shape of stream 1, \(2, 3"):
        ReversibleSequence([(nn.Linear(8, 4), Mlp(8))])(x, x)
    with pytest.raises(TypeError, match=r"must be floating-point tensors: got torch.float32, list"):
        ReversibleSequence(blocks)(x, [x])


@pytest.mark.parametrize("mode", ["reversible", "stored"])
@pytest.mark.parametrize(
    "function, got",
    [
        *((lambda x: (x, x), "tuple"), (lambda x: None, "NoneType"), (lambda x: 1.0, "float")),
        *((lambda x: x.detach().numpy(), "ndarray"), (lambda x: x > 0, "torch.bool")),
    ],
)
def test_a_module_that_returns_no_tensor_is_refused(mode: Any, function: Any, got: str) -> None:
    message = f"G of block 1 must return a single floating-point tensor, .* stream 2: got {got}"
    model = ReversibleSequence([mlps(), (Mlp(8), Lambda(function))], mode=mode)
    with pytest.raises(TypeError, match=message):
        model(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))


# Tools that look at operations


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return checkpointed(self.module, x)


@pytest.mark.parametrize("norm", [foreign, own])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_checkpoints_may_be_inside_or_around(where: str, norm: Any) -> None:
    def pair() -> Any:
        f, g = mlps(norm, dropout)
        return (Checkpointed(f), g) if where == "inside" else (f, g)

    def run(model: Any, xs: Any) -> Any:
        is_around = model.mode == "reversible" and where == "around"
        return step(partial(checkpointed, model) if is_around else model, xs)

    expect_stored_run(run, pair=pair, drop_path=0.2, tolerance=1e-12)


def summed(model: Any) -> Tensor:
    y1, y2 = model(*(x.detach() for x in inputs()))
    return (y1 * y2).sum()


def is_recomputed(model: Any) -> bool:
    """Whether autograd keeps two streams only."""
    xs = inputs()
    with count_saved(model.parameters()) as saved:
        kept_alive = model(*xs)
    del kept_alive
    return sum(saved.values()) == 2 * xs[0].nbytes


@pytest.mark.parametrize(
    "mode, training, evaluation",
    [("auto", True, False), ("reversible", True, True), ("stored", False, False)],
)
def test_the_mode_says_what_is_recomputed(mode: Mode, training: bool, evaluation: bool) -> None:
    model = build(mode)
    assert is_recomputed(model) == training
    model.eval()
    assert is_recomputed(model) == evaluation
    model.layers[1]["G"].train()  # one module suffices
    assert is_recomputed(model) == training


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_traces_hold_plain_operations(mode: Mode, training: bool) -> None:
    """A trace and an exported program can be trained: parameters get the model's gradients."""
    model = build(mode).train(training)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(summed(model), parameters)
    traced: list[Any] = [torch.jit.trace(model, tuple(inputs()))]
    traced.append(torch.export.export(model, tuple(inputs())).module())
    for trace in traced:
        own = dict(trace.named_parameters())
        found = torch.autograd.grad(summed(trace), [own[n] for n, _ in model.named_parameters()])
        for g, e in zip(found, expected, strict=True):
            torch.testing.assert_close(g, e)


@pytest.fixture
def compiler() -> Iterator[Callable[..., Any]]:
    """torch.compile without a compiler behind the graph, which says so if Dynamo skips a model."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    yield lambda model, **options: torch.compile(model, backend=backend, **options)
    assert graphs


def expect_equal_step(compiled: Any, model: Any) -> None:
    ys = [summed(m) for m in (compiled, model)]
    found, expected = ([y, *torch.autograd.grad(y, model.parameters())] for y in ys)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode, training", [("auto", False), ("stored", False), ("stored", True)])
def test_stored_blocks_compile_to_one_graph(mode: Mode, training: bool, compiler: Any) -> None:
    model = build(mode).train(training)
    expect_equal_step(compiler(model, fullgraph=True), model)


def test_recomputation_stays_outside_of_compiled_graphs(compiler: Callable[..., Any]) -> None:
    model = build("auto")
    compiled = compiler(model)
    expect_equal_step(compiled, model)
    assert is_recomputed(compiled)


def test_recomputation_in_one_graph_names_the_cure(compiler: Callable[..., Any]) -> None:
    assert summed(compiler(build("stored"), fullgraph=True)).isfinite()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'part of .* set `mode="stored"`'):
        summed(compiler(build("auto"), fullgraph=True))
