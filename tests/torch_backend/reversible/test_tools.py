"""Reversible blocks in evaluation, and under tools that look at operations: traces, compilers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers import require

require.need("torch")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from multibn.torch_backend.reversible import ReversibleSequence  # noqa: E402

MODES = ["auto", "reversible", "stored"]


def build(mode: Any = "auto", depth: int = 3) -> Any:
    torch.manual_seed(0)

    def function() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    blocks = [(function(), function()) for _ in range(depth)]
    return ReversibleSequence(blocks, mode=mode).double()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2)]


def summed(model: Any) -> Tensor:
    y1, y2 = model(*inputs())
    return (y1 * y2).sum()


def is_recomputed(model: Any) -> bool:
    """Whether autograd saves the streams at the end only."""
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.data_ptr())
        return t

    own = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ys = model(*inputs())
    assert len(ys) == 2
    return len(set(saved) - own) == 2


@pytest.mark.parametrize(
    "mode, training, evaluation",
    [("auto", True, False), ("reversible", True, True), ("stored", False, False)],
)
def test_mode_and_training_say_what_is_recomputed(
    mode: str, training: bool, evaluation: bool
) -> None:
    model = build(mode)
    assert is_recomputed(model) == training
    model.eval()
    assert is_recomputed(model) == evaluation
    model.layers[1]["G"].train()  # one module suffices
    assert is_recomputed(model) == training


def test_second_order_works_in_evaluation() -> None:
    def penalty_gradients(model: Any) -> tuple[Tensor, ...]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(summed(model), parameters, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return torch.autograd.grad(penalty, parameters, allow_unused=True)

    found, expected = (penalty_gradients(build(mode).eval()) for mode in ("auto", "stored"))
    assert all(map(torch.equal, found[:-1], expected[:-1]))
    with pytest.raises(RuntimeError, match=r'twice, which .*, or `mode="auto"` in eval'):
        penalty_gradients(build("reversible").eval())


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own use
def test_forward_mode_and_vmap_work_in_evaluation() -> None:
    model = build().eval()
    x1, x2 = inputs()
    tangent = torch.func.jvp(lambda x: model(x, x2)[0], (x1,), (x2,))[1]
    apart = torch.func.vmap(model)(x1[:, None], x2[:, None])
    torch.testing.assert_close(torch.stack(apart).flatten(1, 2), torch.stack(model(x1, x2)))
    _, expected = torch.autograd.functional.jvp(lambda x: model(x, x2)[0], x1, x2)
    torch.testing.assert_close(tangent, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_traces_hold_plain_operations(mode: str, training: bool) -> None:
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
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    yield lambda model, **options: torch.compile(model, backend=backend, **options)
    assert graphs
    torch.compiler.reset()


@pytest.mark.parametrize("mode, training", [("auto", False), ("stored", False), ("stored", True)])
def test_blocks_without_recomputation_compile_to_one_graph(
    mode: str, training: bool, compiler: Callable[..., Any]
) -> None:
    model = build(mode).train(training)
    compiled = summed(compiler(model, fullgraph=True))
    assert torch.equal(compiled, summed(model))
    found, expected = (
        torch.autograd.grad(y, model.parameters()) for y in (compiled, summed(model))
    )
    assert all(map(torch.equal, found, expected))


def test_recomputation_stays_outside_of_compiled_graphs(compiler: Callable[..., Any]) -> None:
    model = build()
    compiled = compiler(model)
    found, expected = (
        torch.autograd.grad(summed(m), model.parameters()) for m in (compiled, model)
    )
    assert all(map(torch.equal, found, expected))
    assert is_recomputed(compiled)


def test_recomputation_in_one_graph_names_the_cure(compiler: Callable[..., Any]) -> None:
    assert summed(compiler(build("stored"), fullgraph=True)).isfinite()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'outside of .* take `mode="stored"`'):
        summed(compiler(build(), fullgraph=True))
