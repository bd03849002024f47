"""DTensors in and out, for all placements of a mesh of 2 x 2 ranks.

The expected numbers are those of the whole batch in one process, in float64, by the oracle.
"""

import copy
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import multibn
from multibn import SingleProcess
from multibn import torch_backend as tb
from multibn.communicators import Communicator
from multibn.communicators.watchdog import Watchdog
from multibn.parity import oracle
from multibn.torch_backend import check_sync as expect_in_sync  # not a check of its own
from tests.harness.runs import on
from tests.helpers.pages import script
from tests.helpers.spread import OTHERS
from tests.torch_backend.convert.test_class_swap import Activated2d

RUNS = on("torchrun", 4, needs="torch")

SHAPE = (5, 7, 3, 6)  # 2 ranks divide some evenly, some unevenly
C = SHAPE[1]
PLACEMENTS: list[Placement] = [Shard(0), Shard(2), Shard(3), Replicate()]
BOTH = [Shard(0), Shard(3)]


def _mesh(*sizes: int, **options: Any) -> Any:
    names = ("dp", "spatial")[: len(sizes)]
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=names, **options)


def _whole(step: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(step).normal(scale, 2, SHAPE))


def _layer(**options: Any) -> Any:
    torch.manual_seed(0)
    layer = tb.SyncBatchNorm(C, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def _place(x: Tensor, mesh: Any, placements: Any) -> Any:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


@contextmanager
def _messages() -> Iterator[list[str]]:
    """The calls of layers in which this rank has sent messages."""
    calls: list[str] = []
    wait = Watchdog.wait

    def counting_wait(self: Any, begin: Any, text: object) -> None:
        if not isinstance(text, str):  # a layer's, which is written for errors alone
            calls.append(str(text))
        wait(self, begin, text)

    with patch.object(Watchdog, "wait", counting_wait):
        yield calls


def _expected(layer: Any, steps: int) -> list[Any]:
    weight, bias = (p.detach().numpy() for p in (layer.weight, layer.bias))
    return [
        oracle.batch_norm([_whole(k).numpy()], [_whole(k + 9).numpy()], weight, bias, eps=layer.eps)
        for k in range(steps)
    ]


def _full(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _compare(got: dict[str, Any], expected: dict[str, Any], case: Any) -> None:
    full = {name: _full(t).detach().numpy() for name, t in got.items()}
    for name, value in expected.items():
        error = oracle.relative_error(full[name], value)
        assert error < 1e-11, (case, name, error)


def _train(layer: Any, mesh: Any, placements: Any, whole: list[Any], world: Communicator) -> None:
    """Two steps, compared with the oracle; counts what the ranks send."""
    case = placements, type(layer.weight.data).__name__
    moving = np.zeros(C), np.ones(C)
    for step, expected in enumerate(whole):
        x = _place(_whole(step), mesh, placements).requires_grad_()
        layer.zero_grad()
        with CommDebugMode() as collectives, _messages() as messages:
            y = layer(x)
            y.backward(_place(_whole(step + 9), mesh, placements))
        for t in (y, x.grad):
            assert t.placements == tuple(placements), (case, t)
            assert (t.shape, t.stride()) == (x.shape, x.stride())
        gradients = {}
        for name in ("weight", "bias"):
            grad = getattr(layer, name).grad
            if isinstance(grad, DTensor):
                gradients[name] = grad.full_tensor()
            else:  # each rank's own part: replicas have equal parts
                replicas = 2 ** sum(p.is_replicate() for p in placements)
                gradients[name] = world.allreduce(grad) / replicas
        factor = expected.count / (expected.count - 1)
        moving = oracle.running(moving, expected.mean, expected.var, factor, 0.1)
        buffers = {name: _full(b) for name, b in layer.named_buffers()}
        got = {"y": y, "dx": x.grad.full_tensor(), **gradients, **buffers}
        right = {"y": expected.y[0], "dx": expected.dx[0], "weight": expected.dweight}
        right |= {"bias": expected.dbias, "running_mean": moving[0], "running_var": moving[1]}
        _compare(got, right, (case, step))
        assert buffers["num_batches_tracked"].item() == step + 1
        shared = any(p.is_shard() for p in placements)
        assert len(messages) == 2 * shared, case
        assert not collectives.get_total_counts(), case


def check_layers_train_in_all_placements(world: Communicator) -> None:
    """Parameters and buffers are plain, or on the mesh."""
    mesh, whole = _mesh(2, 2), _expected(_layer(), 2)
    for placements in itertools.product(PLACEMENTS, PLACEMENTS):
        _train(_layer(), mesh, placements, whole, world)
        _train(distribute_module(_layer(), mesh), mesh, placements, whole, world)
    # The ranks that share are along two of three dimensions, but not all ranks.
    mesh = dist.init_device_mesh("cpu", (2, 1, 2))
    _train(_layer(), mesh, [Shard(0), Shard(2), Replicate()], whole, world)


def _evaluated(layer: Any, x: Any, dy: Any) -> dict[str, Any]:
    y = layer(x.requires_grad_())
    y.backward(dy)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y, "dx": x.grad, **gradients}


def check_evaluation_is_local_in_all_placements(world: Communicator) -> None:
    """The numbers and the gradients are those of one process, whatever the options are."""
    mesh, cases = _mesh(2, 2), itertools.product(PLACEMENTS, PLACEMENTS)
    others = [{name: v} for name, values in OTHERS.items() for v in values if name != "num_splits"]
    for options, placements in (*(({}, p) for p in cases), *((o, tuple(BOTH)) for o in others)):
        plain = _layer(**options).eval()
        for buffer in (b for b in plain.buffers() if b.ndim):
            nn.init.uniform_(buffer, 0.5, 2)
        layer: Any = distribute_module(copy.deepcopy(plain), mesh)
        x, dy = (_place(_whole(k), mesh, placements) for k in (0, 1))
        with _messages() as messages, CommDebugMode() as collectives:
            got, right = _evaluated(layer, x, dy), _evaluated(plain, _whole(0), _whole(1))
        assert not messages or not plain.track_running_stats
        assert not collectives.get_total_counts()
        assert got["y"].placements == got["dx"].placements == placements
        numbers = {name: t.detach().numpy() for name, t in right.items()}
        _compare(got, numbers, (options, placements))


def check_residual_relu_and_second_order_equal_one_process(world: Communicator) -> None:
    mesh, results = _mesh(2, 2), []
    for place in (None, BOTH):
        layer = _layer(fuse_relu=True, process_group=None if place else SingleProcess())
        given = [_place(_whole(k), mesh, place) if place else _whole(k) for k in (0, 1)]
        x, residual = (t.requires_grad_() for t in given)
        y = layer(x, residual)
        first = torch.autograd.grad(y.pow(3).sum(), (x, residual), create_graph=True)
        first[0].square().sum().backward()
        results.append([_full(t) for t in (y, *first, x.grad, residual.grad)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    part = _place(_whole(0), mesh, BOTH)
    turned = dist.DeviceMesh("cpu", [[0, 2], [1, 3]])
    replicated = [Replicate()] * 2
    for wrong, got in (
        (_place(_whole(1), mesh, replicated), r"\(Replicate.* on ranks \[\[0, 1\], \[2, 3\]\]"),
        (_place(_whole(1), turned, BOTH), r"\(Shard.* on ranks \[\[0, 2\], \[1, 3\]\]"),
        (part.to_local(), "a plain tensor"),
    ):
        text = r"`residual` must have placements \(Shard.*\) on the mesh of the input, .*: got "
        with pytest.raises(TypeError, match=f"{text}{got}. Call distribute_tensor or redist"):
            layer(part, wrong)


def check_the_function_takes_dtensors(world: Communicator) -> None:
    """And layers, of an input still under way."""
    mesh = _mesh(2, 2)
    x = _place(_whole(0), mesh, BOTH)
    expected = _expected(_layer(), 1)[0]
    layer = _layer()
    y, batch = tb.sync_batch_norm(x, layer.weight, layer.bias)
    _compare({"y": y, "mean": batch.mean}, {"y": expected.y[0], "mean": expected.mean}, 0)
    under_way = _place(_whole(0), mesh, [Replicate(), Shard(3)])
    under_way = under_way.redistribute(placements=[Shard(0), Shard(0)], async_op=True)
    _compare({"y": layer(under_way)}, {"y": expected.y[0]}, "under way")


def _steps(model: Any, mesh: Any, place: Any) -> list[Any]:
    """Two steps of training, an evaluation, and what the model has learned."""
    results: list[Any] = []
    for step in range(3):
        x = _place(_whole(step), mesh, place).requires_grad_()
        y = model.train(step < 2)(x)
        assert y.placements == tuple(place)
        y.square().sum().backward()
        results += [_full(y), _full(x.grad)]
    return [*results, *model.buffers()]


def check_a_forward_pass_of_its_own_takes_dtensors(world: Communicator) -> None:
    """It gives what the layer with a ReLU behind gives."""
    layers = nn.Sequential(tb.SyncBatchNorm(C), nn.ReLU()), Activated2d(C)
    results = [_steps(tb.convert_sync_batchnorm(n.double()), _mesh(2, 2), BOTH) for n in layers]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


def check_compiled_code_gives_eager_numbers(world: Communicator) -> None:
    """The layers train uncompiled between compiled parts; a whole graph is refused with a cure.

    Rank 0 alone compiles: a compilation takes seconds.
    """
    mesh, layers = _mesh(2, 2), (tb.SyncBatchNorm(C), Activated2d(C))
    net = tb.convert_sync_batchnorm(nn.Sequential(nn.Tanh(), *layers, nn.Tanh()).double())
    with warnings.catch_warnings():
        # torch's own: of its imports, and of the inputs of compiled parts.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        other = copy.deepcopy(net)
        compiled = other if world.rank else torch.compile(other, backend="eager")
        results = [_steps(model, mesh, BOTH) for model in (net, compiled)]
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
        for part in [*net.train()][1:3]:
            whole: Any = torch.compile(nn.Sequential(part), backend="eager", fullgraph=True)
            with pytest.raises(Exception, match=r"not compiled .* without fullgraph=True"):
                whole(_place(_whole(0), mesh, BOTH))


def check_what_does_not_fit_is_refused_on_all_ranks(world: Communicator) -> None:
    """The same error on all ranks, and no rank waits."""
    mesh = _mesh(2, 2)
    x, layer = _place(_whole(0), mesh, BOTH), _layer()
    partial = DTensor.from_local(_whole(0), mesh, [Partial(), Replicate()])
    for module in (layer, copy.deepcopy(layer).eval()):
        for wrong in (partial, _place(_whole(0), mesh, [Shard(1), Replicate()])):
            message = rf"must be Replicate .*got {re.escape(repr(wrong.placements[0]))} on dim"
            with pytest.raises(TypeError, match=message):
                module(wrong)
    with pytest.raises(ValueError, match=r"must have 3 channels in dimension 1.*\(5, 7, 3, 6\)"):
        tb.SyncBatchNorm(3).double()(x)
    for name in ("weight", "running_mean"):
        for where, placement in ((_mesh(4), [Replicate()]), (mesh, [Shard(0), Replicate()])):
            other: Any = _layer()
            placed = _place(getattr(other, name).detach(), where, placement)
            setattr(other, name, nn.Parameter(placed) if name == "weight" else placed)
            if name == "weight" or len(placement) == 2:
                text = (
                    r"DTensors must have placements \(Repl.*, ranks \[\[0, 1\], \[2, 3\]\]: got \("
                )
                with pytest.raises(TypeError, match=rf"{text}.*\) on ranks .*\. Call distrib"):
                    other(x)
    plain, mask = _whole(0), torch.ones(SHAPE[0], *SHAPE[2:], dtype=torch.bool)
    model: Any = distribute_module(_layer(), mesh)
    for call in (
        lambda: model(plain),
        lambda: model(plain, mask=mask),
        lambda: copy.deepcopy(model).eval()(plain),
        lambda: _layer(fuse_relu=True)(plain, x),
    ):
        with pytest.raises(TypeError, match=r"input must be a DTensor if .*: got a Tensor\. Call"):
            call()
    part = distribute_tensor(plain, dist.DeviceMesh("cpu", [[0], [1]]), [Shard(0), Shard(2)])
    if world.rank < 2:
        text = r"process_group=torch\.distributed\.new_group\(\[0, 1\], use_local_sync.*=True\), wh"
        with pytest.warns(UserWarning, match=text):
            layer(part)
    else:
        text = rf"must contain this rank, {world.rank}: got a mesh of ranks \[\[0\], \[1\]\]\. Call"
        with pytest.raises(ValueError, match=text):
            layer(part)
    with pytest.raises(TypeError, match="num_splits are not supported for DTensor inputs"):
        tb.SubBatchNorm2d(2, num_features=C).double()(
            _place(torch.ones(4, C, 2, 2).double(), mesh, BOTH)
        )
    layer(x)
    placed_model = distribute_module(nn.Linear(2, 2), mesh)
    told = r"sharded over the ranks\. .* `ignore=dict\(model\.named_parameters\(\)\)` to"
    with pytest.raises(TypeError, match=told):
        expect_in_sync(placed_model)
    expect_in_sync(placed_model, ignore=dict(placed_model.named_parameters()))
    with pytest.raises(TypeError, match=r"`parameters` must not be sharded: got a DTensor\. FSDP"):
        tb.average_gradients(placed_model)


def check_a_named_group_decides(world: Communicator) -> None:
    """A group that was named may have ranks outside of the mesh, which hold further samples."""
    mesh = _mesh(2, 2)
    spatial, dp = mesh["spatial"], mesh["dp"]
    mine = _whole(0).chunk(2)[mesh.get_coordinate()[0]]  # the samples of this rank's row
    x = _place(mine, spatial, [Shard(3)])
    expected = _expected(_layer(), 1)[0]
    for group in (world, dist.group.WORLD):
        y = _layer(process_group=group)(x)
        full = DTensor.from_local(
            _full(y), dp, [Shard(0)], shape=torch.Size(SHAPE), stride=_whole(0).stride()
        )
        _compare({"y": full}, {"y": expected.y[0]}, group)
    weight, bias = (p.detach().numpy() for p in _layer().parameters())
    by_rows = oracle.batch_norm([mine.numpy()], [mine.numpy()], weight, bias, eps=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = _layer(process_group=spatial)(x)
    _compare({"y": y}, {"y": by_rows.y[0]}, "rows")
    text = r"over ranks \[\d, \d\], .* not with ranks outside the mesh. If"
    warned: Any = pytest.warns(UserWarning, match=text)
    raised: Any = pytest.raises(UserWarning, match=text)  # on one rank alone, after the message
    with raised if world.rank == 0 else warned, warnings.catch_warnings():
        if world.rank == 0:
            warnings.simplefilter("error")
        _layer()(x)
    with warned if world.rank == 0 else nullcontext() as caught:
        y = nn.Sequential(_layer())(x)
    if caught:  # at a line of the user's; its advice can be typed
        assert caught[0].filename == __file__
        advised: Any = re.search(r"process_group=(.*), where", str(caught[0].message))
        names = {"mesh": x.device_mesh, "torch": torch, "multibn": multibn}
        assert set(dist.get_process_group_ranks(eval(advised[1], names))) == {0, 1}
    _compare({"y": y}, {"y": by_rows.y[0]}, "rows")
    _layer()(x)  # warned before


class _Scale(nn.Module):
    """A convolution of DTensors gathers the images; a product leaves them where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 4).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def check_fsdp_trains_images_in_parts_like_one_process(world: Communicator) -> None:
    """FSDP2 over one dimension, the width of the images over the other: as one process trains."""
    mesh = _mesh(2, 2)
    parts = [_Scale(), nn.BatchNorm2d(4), nn.ReLU(), _Scale(), nn.BatchNorm2d(4)]
    whole, images = nn.Sequential(*parts).double(), torch.randn(6, 4, 3, 8).double()
    dist.broadcast(images, 0)
    net: Any = tb.convert_sync_batchnorm(copy.deepcopy(whole), world)
    net = fully_shard(distribute_module(net, mesh["spatial"]), mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(n.parameters(), 0.1) for n in (whole, net)]
    samples = images.chunk(2)[mesh.get_coordinate()[0]]
    for _ in range(3):
        whole(images).square().mean().backward()
        net(_place(samples, mesh["spatial"], [Shard(3)])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(_full(tensor), whole.state_dict()[name], rtol=1e-11, atol=1e-11)


def check_the_blocks_of_the_page_run(world: Communicator) -> None:
    exec(script("docs/guides/dtensors.md"), {})
