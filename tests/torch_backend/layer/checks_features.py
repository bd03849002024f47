"""The layer inside what torch wraps around models: compilation, checkpoints, sharding, join."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from multibn import SingleProcess
from multibn import torch_backend as tb
from multibn.communicators import Communicator, nonfinite
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on, only
from tests.helpers.ranks import refusal

RUNS = on("torchrun mpiexec", 2, 4, needs="torch")


def _parts(world: Communicator, *shape: int) -> list[torch.Tensor]:
    """All ranks' inputs, of equal shape."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).double() for _ in range(world.size)]


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 2),
    ).double()


@only(sizes=(2,))
def check_nan_in_a_gradient_is_named_in_anomaly_mode(world: Communicator) -> None:
    """Otherwise a GradScaler finds NaN on all ranks, and all skip the step."""
    model = nn.Sequential(tb.SyncBatchNorm(3, process_group=world))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    dy = torch.ones(4, 3)
    dy[0, 0] = torch.nan if world.rank == 1 else 1.0
    message = rf"gradient of the output of .* has NaN on rank\(s\) \[1\] of {world.size}\. Check"
    for run in (model, compiled):
        for check_nan in (False, True):
            x = torch.randn(4, 3, requires_grad=True)
            with torch.autograd.set_detect_anomaly(True, check_nan):
                y = run(x)
                # torch's traceback of the forward pass is a warning, which, as an error, would be
                # taken for the end of the program.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with pytest.raises(FloatingPointError, match=message):
                        y.backward(dy)
                run(x).backward(torch.ones(4, 3))  # all is well
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, 3, requires_grad=True)
    loss = (model(x) * dy).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert x.grad is not None
    assert not x.grad.isfinite().all()
    assert scaler.get_scale() <= 2.0**16


@only("torchrun", sizes=(2,))
def check_a_step_that_overflows_leaves_no_trace(world: Communicator) -> None:
    """Rank 1 overflows in step 2 in float16, with a GradScaler, eager and compiled."""
    names = []
    for compiled in (False, True):
        found = []
        for sees in (True, False):
            nonfinite._warned_at = -math.inf
            model: Any = tb.convert_sync_batchnorm(_network().float(), world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            run = torch.compile(model, backend="aot_eager") if compiled else model
            counting = [
                m.layer_communicator for m in model.modules() if isinstance(m, tb.SyncBatchNorm)
            ]
            for step in range(5):
                x = _parts(world, 2, 3, 8, 8)[world.rank].float() + step
                if step == 2 and not sees:
                    scaler.update(scaler.get_scale() / 2)
                    continue
                x = x * 1e6 if step == 2 and world.rank == 1 else x
                with (
                    torch.autocast("cpu", dtype=torch.float16),
                    warnings.catch_warnings(record=True) as told,
                ):
                    warnings.simplefilter("always")
                    loss = run(x).float().square().mean()
                    scaler.scale(loss).backward()
                names += [str(w.message) for w in told if w.category is RuntimeWarning]
                for p in model.parameters():
                    p.grad = world.allreduce(p.grad) / world.size
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append(model.state_dict())
            counts = [[phase._calls[0] for phase in c.phases.values()] for c in counting]
            assert len({sum(each) for each in counts}) == 1
        torch.testing.assert_close(*found, rtol=0, atol=0)
    text = f"rank {world.rank} of {world.size} has skipped a batch in layer 1, on all ranks: "
    assert len(names) == 2
    where = f"values that overflow on rank(s) [1] of {world.size}. The out"
    assert all(name.startswith(text) and where in name for name in names)


@only(sizes=(2,))
def check_each_skipped_batch_is_told_of_by_the_layer_where_nan_came_in(world: Communicator) -> None:
    nonfinite._warned_at = -math.inf
    x, infinite = torch.randn(4, 3), torch.full((4, 3), torch.inf)
    bad, beside_none = (infinite,) * 2 if world.rank == 0 else (x, x[:0])
    layers = [tb.SyncBatchNorm(3, process_group=world, nonfinite="skip") for _ in range(2)]
    both = nn.Sequential(*layers)
    alone = tb.SyncBatchNorm(3, process_group=SingleProcess(), nonfinite="skip")
    if world.rank == 0:  # one whose NaN goes into none of these
        with pytest.warns(RuntimeWarning, match="rank 0 of 1 has skipped") as caught:
            nn.Sequential(alone)(infinite)
        assert caught[0].filename == __file__  # not a line of multibn's or torch's

    def trained(model: Any, x: torch.Tensor) -> None:
        model(x.clone().requires_grad_()).sum().backward()

    def evaluated(model: Any, x: torch.Tensor) -> None:
        with torch.no_grad():
            model(x)

    def second_order(model: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)

    on_0, on_all = "rank(s) [0] of 2", "rank(s) [0, 1] of 2"
    told = []
    for run, model, batch, where in (
        (trained, layers[1], bad, f"SyncBatchNorm .* on {on_0}"),
        (trained, both, bad, f"layer 0, .* on {on_0}"),
        (trained, both, infinite, f"layer 0, .* on {on_all}"),
        (trained, both, beside_none, f"layer 0, .* on {on_0}"),
        (trained, both, x, ""),
        (evaluated, both, bad, f"layer 0, .* on {on_0}"),
        (second_order, both, bad, f"layer 0, .* on {on_0}"),
    ):
        nonfinite._warned_at = -math.inf
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", RuntimeWarning)
            run(model, batch)
        said = [str(w.message) for w in found if w.category is RuntimeWarning]
        told.append((where.partition(" .* "), said))
    for (layer, _, where), said in told:
        assert len(said) == bool(layer), told
        assert not said or (f" in {layer}" in said[0] and f"{where}. The" in said[0]), told


class _Branches(nn.Module):
    """Layers that do not wait for each other, one of them without any effect on the output."""

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4)
        weightings: list[Any] = ["element", "rank", "sample"]
        self.bns = nn.ModuleList(
            tb.SyncBatchNorm(4, process_group=world, weighting=w) for w in weightings
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.bns[2](2 * y)
        return self.bns[0](y).relu() + self.bns[1](y.sin())


@only("torchrun", sizes=(4,))
def check_compiled_ranks_train_beside_eager_ones(world: Communicator) -> None:
    """Compiled ranks send the messages of the others in their order, whatever their graphs."""
    eager, mixed = _Branches(world), _Branches(world)
    # Rank 1 is not compiled; inductor drops what no output needs.
    backend = ["inductor", None, "aot_eager", "eager"][world.rank]
    run = mixed if backend is None else torch.compile(mixed, fullgraph=True, backend=backend)
    results: list[Any] = []
    for net, call in ((eager, eager), (mixed, run)):
        for n in (2 + world.rank, 3, 0 if world.rank == 0 else 4):
            x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).double()
            y = call(x.requires_grad_())
            width = 40 * (1 + len(results))  # of ever wider messages before the backward pass
            wide = tb.SyncBatchNorm(width, process_group=world)
            wide(torch.rand(3, width, requires_grad=True)).sum().backward()
            (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
            results.append([y, x.grad])
        results.append([p.grad for p in net.parameters() if p.grad is not None])
        results.append(list(net.buffers()))
    for got, expected in zip(results[5:], results[:5], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


class _InOrder(nn.ModuleDict):
    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return torch.stack([self[name](x) for name in names])


@only("torchrun", sizes=(2,))
def check_a_rank_in_another_compiled_layer_is_named(world: Communicator) -> None:
    """The layers change places on rank 1 in the third step, which rank 1 compiles again."""
    layers = _InOrder({name: tb.SyncBatchNorm(4, process_group=world) for name in "ab"})
    run = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        run(torch.randn(3, 4), "ab")
    places = r"rank\(s\) \[0\] in a \(forward, .*; rank\(s\) \[1\] in b \(forward, "
    with pytest.raises(RuntimeError, match=places):
        run(torch.randn(3, 4), "ba" if world.rank else "ab")


@only("torchrun", sizes=(2,))
def check_an_error_in_traced_code_reaches_all_ranks(world: Communicator) -> None:
    """Rank 0's input is wrong in the first compiled call: the others do not wait for it."""
    x = torch.randn(4, 4, 2, 2)
    layers: list[tuple[Any, torch.Tensor, Any, str]] = [
        (partial(tb.SubBatchNorm2d, 2, 4), x[:3], ValueError, "got 2 splits for a batch of 3"),
        (partial(tb.SyncBatchNorm2d, 4), x[0], ValueError, "expected 4D input"),
        (partial(tb.SyncBatchRenorm2d, 4), x[:, :3], ValueError, "must have 4 channels"),
        (partial(tb.SyncGroupNorm, 2, 4), x.repeat(1, 2, 1, 1), ValueError, "must have 4 channels"),
        (partial(tb.SyncBatchNorm, 4), x[:, :3], ValueError, "must have 4 channels"),
        (partial(tb.SyncBatchNorm, 4), x.long(), TypeError, r"torch\.int64"),
    ]
    for make, wrong, kind, message in layers:
        torch._dynamo.reset()
        whole = make.func is tb.SyncBatchNorm  # the others' own errors break the graph
        run = torch.compile(make(process_group=world), backend="aot_eager", fullgraph=whole)
        with refusal(world, 0, kind, message):
            run(x if world.rank else wrong)
    with pytest.raises(FloatingPointError, match="are not finite"):
        run(x if world.rank else x / 0)
    layer = tb.SyncBatchNorm(4, eps=0.5, process_group=world)
    layer.eps = 0.5 if world.rank else float("inf")
    with refusal(world, 0, ValueError, r"`eps` must be in \[1\.18e-38, inf\): got inf"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@only(sizes=(2,))
def check_collective_functions_run_in_compiled_code(world: Communicator) -> None:
    """They break the graph."""
    net: Any = tb.convert_sync_batchnorm(_network(), world)
    seen: Any = tb.RunningNorm(2, process_group=world)
    inputs = torch.full((3, 2), 1.0 + world.rank)

    @torch.compile(backend="eager")
    def after_backward() -> Any:
        tb.average_gradients(net, process_group=world)
        tb.sync_running_stats(net, process_group=world)
        expect_in_sync(net, process_group=world)
        seen.update(inputs)
        seen.synchronize()
        return seen.mean + 1

    net(torch.ones(2, 3, 8, 8, dtype=next(net.parameters()).dtype)).sum().backward()
    mean = after_backward() - 1
    assert mean.tolist() == [(1 + world.size) / 2] * 2


def _train(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@only("torchrun", sizes=(2,))
def check_sharded_models_train_like_one_process(world: Communicator) -> None:
    """FSDP on CPU, as one process on the whole batch; FSDP2: tests/originals/checks_torch.py."""
    parts = _parts(world, 4, 3, 8, 8)
    whole = _network()
    expected = torch.stack(_train(whole, torch.cat(parts)))
    inner = tb.convert_sync_batchnorm(_network())
    net = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    losses = world.allreduce(torch.stack(_train(net, parts[world.rank]))) / world.size
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-11)
    buffers = dict(whole.named_buffers())
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, buffers[name.removeprefix("_fsdp_wrapped_module.")])


def check_the_function_moves_the_running_arrays_of_any_slice(world: Communicator) -> None:
    """Equal torch's function on the data of all ranks: the slices of once-for-all networks."""
    parts = [x + 3 * rank for rank, x in enumerate(_parts(world, 3, 8, 2))]
    expected: Any = nn.BatchNorm1d(8).double()
    layer: Any = nn.BatchNorm1d(8).double()
    for part in (slice(8), slice(4), slice(0, 8, 2), slice(5, 6), slice(4)):
        x = parts[world.rank][:, part].clone().requires_grad_()
        whole = torch.cat([x[:, part] for x in parts])
        mean, var = expected.running_mean[part], expected.running_var[part]
        y = nn.functional.batch_norm(whole, mean, var, training=True, momentum=0.3)
        of_layer: Any = {
            "running_mean": layer.running_mean[part],
            "running_var": layer.running_var[part],
        }
        found, _ = tb.sync_batch_norm(x, process_group=world, momentum=0.3, **of_layer)
        found.sum().backward()
        torch.testing.assert_close(found, y[3 * world.rank :][:3], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()))
    own = {"running_mean": torch.zeros(8), "running_var": torch.ones(8)}
    message = r"with momentum=0\.1; .*\[1\] with momentum=0\.2"
    for options in ({"momentum": 0.2} | own, {}):  # of rank 1
        with pytest.raises(ValueError, match=message if options else r"with momentum=None"):
            tb.sync_batch_norm(
                parts[0], process_group=world, **(options if world.rank == 1 else own)
            )
    narrow: Any = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    for wrong in ({"running_var": None}, {"momentum": 2}, {"running_var": torch.ones(7)}):
        refused: Any = narrow | wrong
        given = refused if world.rank == 1 else narrow
        with refusal(
            world, 1, ValueError, r"`(running_mean` and `running_var|momentum|running_var)` must "
        ):
            tb.sync_batch_norm(parts[0][:, :4], process_group=world, **given)
    tb.sync_batch_norm(parts[0][:, :4], process_group=world, **narrow)  # all is well
