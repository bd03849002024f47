"""torch.compile takes the layers whole, and changes nothing."""

import copy
import importlib
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from multibn import SingleProcess
from multibn.parity import oracle
from multibn.torch_backend import SubBatchNorm1d, SyncBatchNorm, sync_batch_norm
from multibn.torch_backend._torch_private import not_compiled
from multibn.torch_backend.layer import compiled as compiled_code
from tests.helpers.ranks import CountingCommunicator
from tests.helpers.spread import spread
from tests.torch_backend.steps import checkpointed

NEEDS = "torch"

# Dynamo and inductor warn of their own deprecated imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the plans that compiled code has made so far."""
    made: list[dict[str, Any]] = []
    plan_of = compiled_code.Plan

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(options)
        return plan_of(*arguments, **options)

    monkeypatch.setattr(compiled_code, "Plan", noted)
    return made


def test_sizes_may_change_without_compiling_again() -> None:
    """One layer runs twice."""
    layer = SyncBatchNorm(4, process_group=SingleProcess())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU(), layer).double()
    twin = copy.deepcopy(model)
    compiled: Any = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (2, 3, 5):
            x = torch.randn(n, 3, 7 + n, 6, dtype=torch.float64)
            found = []
            for call, net in ((compiled, twin), (model, model)):
                y = call(x)
                found.append([y, *torch.autograd.grad(y.sin().sum(), [*net.parameters()])])
            torch.testing.assert_close(*found)
    torch.testing.assert_close(
        list(compiled.state_dict().values()), list(model.state_dict().values())
    )


def test_the_elements_of_one_channel_are_counted() -> None:
    layers = [SyncBatchNorm(1, running_var="unbiased_local") for _ in "ab"]
    x = torch.tensor([[1.0], [3.0]])
    torch.compile(layers[0], fullgraph=True, backend="aot_eager")(x)
    layers[1](x)
    torch.testing.assert_close(*(layer.running_var for layer in layers))


def test_a_residual_that_would_be_broadcast_is_refused() -> None:
    layer = SyncBatchNorm(3, fuse_relu=True, process_group=SingleProcess())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"`residual` must have the shape .*, \(4, 3\) and"):
        compiled(torch.randn(4, 3), torch.randn(1, 3))


def test_a_message_says_whether_a_backward_pass_may_follow() -> None:
    layer, x = SyncBatchNorm(3), torch.randn(4, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x)
    with torch.no_grad():
        compiled(x.clone().requires_grad_())
    assert [needed for *_, needed, _, _ in layer.layer_communicator.phases] == [False]
    compiled(x.requires_grad_())
    assert [needed for *_, needed, _, _ in layer.layer_communicator.phases] == [False, True]


def test_a_step_like_an_earlier_one_prepares_no_plan(plans: list[Any]) -> None:
    layer, eager = (SyncBatchNorm(3, momentum=None) for _ in "ab")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(4, 3, 5, requires_grad=True), torch.rand(4, 5) > 0.5
    counts = []
    for eps, where in [(1e-5, None)] * 3 + [(0.5, None), (0.5, mask)]:
        layer.eps = eager.eps = eps
        found = []
        for normalize in (call, eager):
            y = normalize(x, mask=where)
            found.append([y, *torch.autograd.grad(y.sin().sum(), x)])
        torch.testing.assert_close(*found)
        counts.append(len(plans))
    assert 0 < counts[0] == counts[2] < counts[3] < counts[4]
    torch.testing.assert_close(list(layer.buffers()), list(eager.buffers()))


def test_second_derivatives_where_the_backend_keeps_the_autograd_node() -> None:
    layer = SyncBatchNorm(3, dtype=torch.float64, fuse_relu=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        (dx,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.cos().sum(), x))
    torch.testing.assert_close(*found)


def test_fullgraph_names_the_function_that_is_not_compiled() -> None:
    call = torch.compile(lambda x: sync_batch_norm(x)[0], fullgraph=True, backend="eager")
    message = "sync_batch_norm, and any layer with DTensors, is not compiled and runs eagerly. Call"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        call(torch.randn(4, 3))


def test_check_sync_and_others_import_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes seconds, and on a rank that refuses its input, other ranks wait for it."""
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert not_compiled(lambda: 3)() == 3
    assert "torch._dynamo" not in sys.modules


def test_operators_keep_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are those of a step."""
    called: list[tuple[Any, tuple[Any, ...]]] = []
    call = torch._ops.OpOverloadPacket.__call__

    def noted(packet: Any, /, *arguments: Any, **options: Any) -> Any:
        if packet.__name__ in OPAQUE:
            called.append((packet.default, arguments))
        return call(packet, *arguments, **options)

    monkeypatch.setattr(torch._ops.OpOverloadPacket, "__call__", noted)
    layer = SyncBatchNorm(3, process_group=SingleProcess(), fuse_relu=True, bias=False)
    x, mask = torch.randn(4, 3, 2, requires_grad=True), torch.rand(4, 2) < 0.8
    torch.compile(layer, backend="eager", fullgraph=True)(x, mask=mask).sum().backward()
    monkeypatch.undo()
    assert {each.overloadpacket.__name__ for each, _ in called} == {*OPAQUE}
    for each, arguments in called:
        torch.library.opcheck(
            each, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), arguments)
        )


def test_messages_are_copied_where_a_graph_is_recorded(plans: list[Any]) -> None:
    """Elsewhere the host keeps them, as those of eager layers."""
    importlib.import_module("torch._inductor.cudagraph_trees")
    ways: tuple[Any, ...] = {"mode": "reduce-overhead"}, {"backend": "aot_eager"}
    for options in ways:
        torch.compile(SyncBatchNorm(3), fullgraph=True, **options)(torch.randn(4, 3))
    assert [plan["copied"] for plan in plans] == [True, False]


OPAQUE = "forward_sums", "backward_sums", "checked_mask"


@pytest.mark.parametrize("name", OPAQUE)
def test_nothing_holds_repeats_or_drops_what_communicates(name: str) -> None:
    """A CUDA graph would repeat the sums of one step, and ask nothing of the other ranks."""
    each = getattr(torch.ops.multibn, name).default
    assert torch.Tag.cudagraph_unsafe in each.tags
    graph = fx.Graph()
    graph.call_function(each, (graph.placeholder("x"),))
    graph.output(None)
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes].count(each) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks itself
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_compiled_block_in_a_checkpoint_updates_once(momentum: float | None) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 4),
            SyncBatchNorm(4, momentum=momentum, process_group=SingleProcess()),
            nn.Tanh(),
            nn.Linear(4, 4),
            SubBatchNorm1d(2, 4, momentum=momentum),
        )
        if compiled:
            net.compile(backend="eager")
        x = torch.randn(6, 4, requires_grad=True)
        for _ in range(2):
            checkpointed(net, x).square().sum().backward()
        found.append([*net.buffers(), x.grad])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks itself
def test_a_checkpoint_in_compiled_code_communicates_once() -> None:
    counting = CountingCommunicator(SingleProcess())
    bn, linear = SyncBatchNorm(4, process_group=counting), nn.Linear(4, 4)

    def run(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: linear(bn(linear(x).sin())), x, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    y = compiled(torch.randn(5, 4, requires_grad=True))
    assert counting.take() == [2 * 4 + 2]
    y.square().sum().backward()
    assert counting.take() == [2 * 4]
    assert bn.num_batches_tracked == 1


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_relus_save_no_booleans(fuse_relu: bool) -> None:
    """Inductor's code writes and reads them one by one: half of a block's step on a CPU."""
    saved: list[torch.dtype] = []

    def compile_forward(graph: Any, _: Any) -> Any:
        outputs = graph.graph.output_node().args[0]
        saved.extend(node.meta["val"].dtype for node in outputs if node is not None)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=core_aten_decompositions(),
    )
    conv = nn.Conv2d(4, 4, 1)
    layer = SyncBatchNorm(4, process_group=SingleProcess(), fuse_relu=fuse_relu)
    block = torch.compile(lambda x: (layer(conv(x)) + x).relu(), fullgraph=True, backend=backend)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    block(x).sum().backward()
    assert torch.float32 in saved
    assert torch.bool not in saved


class Compared(fx.Interpreter):
    """Runs a graph, whose tensors must be as inductor was told: its code takes them so."""

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        told, found = (
            [
                (t.dtype, t.shape, t.stride())
                for t in pytree.tree_leaves(values)
                if isinstance(t, Tensor) and t.numel()  # a token of an effect has no numbers
            ]
            for values in (node.meta.get("val", result), result)
        )
        assert told == found, node.format_node()
        return result


@pytest.mark.parametrize(
    "options, dtype",
    spread([{}, {"affine": False}, {"bias": False}], over=[[torch.bfloat16, torch.float32]]),
    ids=str,
)
def test_operators_give_what_the_compiler_was_told(options: Any, dtype: Any) -> None:
    """Parameters are in float32, as in mixed precision."""

    def compile_graph(graph: Any, _: Any) -> Any:
        return make_boxed_func(Compared(graph).run)

    layer = SyncBatchNorm(3, process_group=SingleProcess(), **options)
    call = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=compile_graph))
    x = torch.randn(4, 3, 5, 5).to(dtype)
    mask = torch.rand(4, 5, 5) < 0.8
    for given in ({}, {"mask": mask}, {"residual": x + 1}):
        y = call(x.clone().requires_grad_(), **given)
        y.backward(torch.ones_like(y))


def test_compiled_code_keeps_its_digits_at_a_high_mean() -> None:
    """Mean 1e4, standard deviation 1, in float32, compared with float64."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16).add(1e4).to(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(x.shape)
    layer = SyncBatchNorm(3, momentum=1.0, process_group=SingleProcess())
    compiled: Any = torch.compile(layer, fullgraph=True)

    def step() -> Any:
        y = compiled(x)
        y.backward(dy)
        return y

    y, codes = run_and_get_code(step)
    # In the two loops over the elements, one each way, the coefficients are float32 numbers.
    loops = [part for code in codes for part in code.split("x0<static_cast<int64_t>(2048L)")[1:]]
    assert len(loops) == 2
    assert not any("double" in loop.partition("\n    }\n")[0] for loop in loops)
    xs, dys = [x.detach().numpy()], [dy.numpy()]
    expected = oracle.batch_norm(xs, dys, np.ones(3), np.zeros(3), eps=layer.eps)
    unbiased = expected.var * expected.count / (expected.count - 1)
    for got, numbers, bound in (
        (y, expected.y[0], 4e-6),
        (x.grad, expected.dx[0], 4e-6),
        (layer.weight.grad, expected.dweight, 8e-5),
        (layer.running_mean, expected.mean, 5e-4),  # half of float32's steps at 1e4
        (layer.running_var, unbiased, 2e-7),
    ):
        assert got is not None
        torch.testing.assert_close(got.double(), torch.from_numpy(numbers), rtol=0, atol=bound)


def test_the_compiler_needs_some_memory_for_activations() -> None:
    """docs/limits.md, of torch 2.13."""
    layers = [nn.Conv2d(2, 2, 1), SyncBatchNorm(2), nn.ReLU(), nn.Conv2d(2, 2, 1), SyncBatchNorm(2)]
    model: Any = torch.compile(nn.Sequential(*layers), backend="aot_eager_decomp_partition")
    with torch._functorch.config.patch(activation_memory_budget=0.01):
        model(torch.randn(4, 2, 5, 5)).square().sum().backward()
    if not torch.__version__.startswith("2.13"):
        return
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        pytest.raises(Exception, match="modified by an inplace operation"),
    ):
        model(torch.randn(4, 2, 5, 5)).square().sum().backward()


def test_compiled_autograd_gives_eager_gradients() -> None:
    layer, x = SyncBatchNorm(2), torch.randn(4, 2, 5)

    def step() -> None:
        layer(x).pow(3).sum().backward()

    step()
    assert layer.bias.grad is not None
    expected, layer.bias.grad = layer.bias.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it finds on its way through the nodes
        torch.compile(step)()
    torch.testing.assert_close(layer.bias.grad, expected)
