"""torch.compile takes the layers whole, and changes nothing."""

import copy
from typing import Any

import pytest

from multibn import SingleProcess
from tests.helpers import require

require.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from multibn.torch_backend import (  # noqa: E402
    SubBatchNorm1d,
    SyncBatchNorm,
    checkpoint_contexts,
    recomputed,
)

# Dynamo and inductor warn of their own deprecated imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def build(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        SyncBatchNorm(4, process_group=SingleProcess(), **options),
        nn.ReLU(),
        SyncBatchNorm(4, process_group=SingleProcess(), **options),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"weighting": "rank", "running_var": "unbiased_local"},
    ],
    ids=str,
)
def test_compiled_equals_eager(options: dict[str, Any], backend: str) -> None:
    model = build(**options)
    compiled: Any = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    for step in range(3):
        results = []
        for net in (model, compiled):
            torch.manual_seed(step)
            x = torch.randn(2, 3, 6, 6, requires_grad=True)
            net.zero_grad()
            y = net.train()(x)
            y.square().sum().backward()
            with torch.no_grad():
                evaluated = net.eval()(x)
            results.append([y, x.grad, evaluated, *[p.grad for p in net.parameters()]])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        list(compiled.state_dict().values()), list(model.state_dict().values())
    )


def test_sizes_may_change_without_compiling_again() -> None:
    model = build()
    compiled: Any = torch.compile(
        copy.deepcopy(model), fullgraph=True, backend="aot_eager", dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (2, 3, 5):
            x = torch.randn(n, 3, 7 + n, 6)
            torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(
        list(compiled.state_dict().values()), list(model.state_dict().values())
    )


def test_errors_are_the_layers_own() -> None:
    layer = torch.compile(SyncBatchNorm(3), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks together"):
        layer(torch.ones(1, 3))
    with pytest.raises(ValueError, match="must have 3 channels in dimension 1"):
        layer(torch.ones(2, 4))


@pytest.mark.parametrize("affine", [True, False])
def test_operators_keep_torchs_rules(affine: bool) -> None:
    from multibn.torch_backend import compiled

    alone = SingleProcess()
    compiled.register(alone)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    w, b = (
        [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        if affine
        else [None, None]
    )
    torch.library.opcheck(compiled._forward, (x, w, b, 3, id(alone), 1e-5, "element", (0, 2)))
    c = torch.rand(3, dtype=torch.float64)
    torch.library.opcheck(
        compiled._update_running,
        (torch.zeros(3), torch.ones(3), [c, c, c.sum(), c.sum()], c.sum(), 7, "biased"),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks itself
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_compiled_block_in_a_checkpoint_updates_once(
    use_reentrant: bool, momentum: float | None
) -> None:
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
            if use_reentrant:
                y: Any = checkpoint(recomputed(net), x, use_reentrant=True)
            else:
                y = checkpoint(net, x, use_reentrant=False, context_fn=checkpoint_contexts)
            y.square().sum().backward()
        found.append([*net.buffers(), x.grad])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
