"""Prepared launches against the verbs, bit for bit, see test_cuda.py.

In the interpreter, which compiles nothing that the core could launch, a stand-in for the core runs
the kernels with the addresses that the core would give them.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from multibn import SingleProcess
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.engine import recompute
from multibn.kernels import NormArgs, cuda
from multibn.kernels.triton import launch, prepared
from multibn.torch_backend import SyncBatchNorm, sync_batch_norm
from multibn.torch_backend.layer import compiled
from tests.helpers.spread import OTHERS, spread
from tests.kernels.passes import DEVICE
from tests.kernels.triton_passes import _afresh as _afresh
from tests.kernels.triton_passes import as_on_a_gpu as as_on_a_gpu
from tests.kernels.triton_passes import wide
from tests.kernels.triton_steps import Twice

IMAGES = 4, 8, 4, 4
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and prepared.run_launches is None, reason="the core is missing"
)


def _at(address: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, of the memory at an address."""
    memory = (ctypes.c_byte * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).reshape(like.shape)


def _prepare(launched: Sequence[launch.Launched], slots: dict[str, int]) -> Any:
    return list(launched), slots


def _run(launches: Any, stream: int, *values: int | None) -> None:
    launched, slots = launches
    for each in launched:
        arguments = []
        for name, v in each.named().items():
            value = values[slots[name]] if name in slots and v is not None else v
            if isinstance(v, torch.Tensor):
                assert isinstance(value, int), "memory of the first step"
                value = _at(value, v)
            arguments.append(value)
        each.kernel[each.programs,](*arguments, **each.constants)


@pytest.fixture
def runs(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How many launches were run by the core, or what stands for it."""
    found: list[str] = []
    if DEVICE == "cpu":
        monkeypatch.setattr(prepared, "prepare", _prepare)
        monkeypatch.setattr(prepared, "run_launches", _run)
    run = prepared.run_launches

    def counted(launches: Any, *values: Any) -> None:
        found.append("run")
        run(launches, *values)

    monkeypatch.setattr(prepared, "run_launches", counted)
    return found


def _steps(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], list[Any]], runs: list[str]
) -> tuple[list[Any], int]:
    """Do the work with prepared launches and without; its results, and how many were run."""
    found, counts = [], []
    for made in (cuda.PreparedStep, lambda **options: None):
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "PreparedStep", made)
            runs.clear()
            torch.manual_seed(0)
            found.append(work())
            counts.append(len(runs))
    assert counts[1] == 0
    for ours, right in zip(*found, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            assert ours.dtype == right.dtype
            assert torch.equal(ours, right)
    return found[0], counts[0]


def _train(
    layer: SyncBatchNorm, *, shape: Sequence[int] = IMAGES, dtype: Any = torch.float32,
    steps: int = 3, last: bool = False, residual: bool = False, **call: Any,
) -> list[Any]:  # fmt: skip
    """Outputs, gradients and buffers of some steps."""
    found: list[Any] = []
    for _ in range(steps):
        x, dy, r = (torch.randn(*shape).to(DEVICE, dtype) for _ in range(3))
        if last:
            x, dy, r = (v.to(memory_format=torch.channels_last) for v in (x, dy, r))
        x.requires_grad_()
        layer.zero_grad()
        y = layer(x, r.requires_grad_(), **call) if residual else layer(x, **call)
        y.backward(dy)
        found += y.detach(), x.grad, r.grad, *(p.grad for p in layer.parameters())
        found += (b.clone() for b in layer.buffers())
    return found


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    "dtype, last, alone", spread(DTYPES, [False, True], over=[[False, True]]), ids=str
)
def test_bits_of_dtypes_and_layouts(
    dtype: Any, last: bool, alone: bool, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> list[Any]:
        layer = SyncBatchNorm(8, process_group=SingleProcess() if alone else Twice()).to(DEVICE)
        return _train(layer, dtype=dtype, last=last)

    _, count = _steps(monkeypatch, work, runs)
    assert count == 2 * 4  # two halves of two passes, in all steps but the first


# The verbs take masks, and move cumulative averages.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{
        f"{name}={value}": ({name: value}, {}, 4 if value is None else 8)
        for name, values in OTHERS.items()
        for value in values
        if name != "num_splits"
    },
    "residual": ({"fuse_relu": True}, {"residual": True}, 8),
    "residual without a ReLU": ({}, {"residual": True}, 8),
    "a matrix": ({}, {"shape": (16, 8)}, 8),
    "odd planes": ({}, {"shape": (4, 8, 3, 5)}, 8),
    "mask": ({}, {"mask": torch.arange(16).reshape(4, 1, 4) % 3 > 0}, 0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_options(name: str, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options, call, right = OPTIONS[name]
    call = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in call.items()}

    def work() -> list[Any]:
        return _train(SyncBatchNorm(8, process_group=Twice(), **options).to(DEVICE), **call)

    _, count = _steps(monkeypatch, work, runs)
    assert count == right


def test_bits_where_a_wider_layer_joins(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages are as long as the widest layer's from then on."""

    def work() -> list[Any]:
        group, found = Twice(), []
        narrow, wider = (SyncBatchNorm(C, process_group=group).to(DEVICE) for C in (8, 40))
        for layer, C in ((narrow, 8), (wider, 40), (narrow, 8)):
            found += _train(layer, shape=(4, C, 4, 4))
        return found

    _, count = _steps(monkeypatch, work, runs)
    assert count == 4 * (2 + 2 + 3)


def _misaligned(layer: Any) -> dict[str, Any]:
    return {"of": lambda *shape: torch.randn(math.prod(shape) + 1).to(DEVICE)[1:].reshape(shape)}


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda layer: None, 4),
    "momentum": (lambda layer: setattr(layer, "momentum", 0.5), 0),
    "a cumulative average": (lambda layer: setattr(layer, "momentum", None), 0),
    "running_var": (lambda layer: setattr(layer, "running_var_convention", "biased"), 0),
    "no counter": (lambda layer: layer._buffers.update(num_batches_tracked=None), 2),
    "a gradient of another layout": (lambda layer: {"dy": "expanded"}, 4),
    "a misaligned input": (_misaligned, 0),
    "a weight with gaps": (
        lambda layer: setattr(layer.weight, "data", torch.ones(8, 2, device=DEVICE)[:, 0]), 0,
    ),
    "a profiler's hook": (lambda layer: {"hook": True}, 0),
    "a recorded pass": (lambda layer: {"inside": recompute.recording()}, 2),
    "anomaly mode": (lambda layer: {"inside": torch.autograd.detect_anomaly()}, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_may_change_between_steps_is_seen(
    name: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs by prepared launches, with its own numbers, or by the verbs."""
    change, right = CHANGES[name]
    counts: list[int] = []

    def work() -> list[Any]:
        layer = SyncBatchNorm(8, process_group=Twice()).to(DEVICE)
        _train(layer)
        how: Any = change(layer) or {}
        make = how.get("of", lambda *shape: torch.randn(*shape, device=DEVICE))
        x, dy = (make(*IMAGES) for _ in range(2))
        if how.get("dy") == "expanded":
            dy = torch.randn(4, 8, 1, 1, device=DEVICE).expand(IMAGES)
        runs.clear()
        layer.zero_grad()
        x.requires_grad_()
        with how.get("inside", nullcontext()), monkeypatch.context() as patch:
            if how.get("hook"):
                patch.setattr(prepared.hooks, "calls", [lambda metadata: None])
            y = layer(x)
            y.backward(dy)
        counts.append(len(runs))
        buffers = [b.clone() for b in layer.buffers()]
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *buffers]

    _steps(monkeypatch, work, [])
    assert counts == [right, 0]


@pytest.mark.parametrize("affine", [True, False])
def test_bits_of_the_operators_of_compiled_code(
    affine: bool, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = LayerCommunicator(Twice(), lambda: "bn")
    compiled.register(communicator)
    monkeypatch.setattr(compiled, "select", lambda x: cuda)
    name = communicator.operator_name  # type: ignore[attr-defined]
    axis = 0, 2, 3
    text = repr((name, 8, "element", None, axis, (1e-5, axis, True), True, False, None, [], ()))

    def work() -> list[Any]:
        communicator.plans.clear()
        found = []
        for _ in range(3):
            x, dy = (torch.randn(*IMAGES).to(DEVICE) for _ in range(2))
            weight, bias = (torch.randn(8).to(DEVICE) if affine else None for _ in range(2))
            args = x, weight, bias, None
            sums = compiled._forward_sums(*args, *[None] * 4, text, None)
            gradients = compiled._backward_sums(dy, *args, None, sums[1], True, text, None)
            found += [*sums, *gradients]
        return found

    _, count = _steps(monkeypatch, work, runs)
    assert count == 2 * 4


def test_after_a_change_the_launches_are_prepared_anew(runs: list[str]) -> None:
    layer = SyncBatchNorm(8, process_group=Twice()).to(DEVICE)
    _train(layer)
    layer.running_var_convention = "biased"
    runs.clear()
    _train(layer, steps=1)
    assert runs == []  # other options have plans of their own
    _train(layer, steps=1)
    assert len(runs) == 4


def test_a_thread_collects_its_own_launches_only() -> None:
    """Two models may train in threads of one process."""
    args: Any = NormArgs(None, None, None, 1e-5, (0,))
    with launch.collecting() as ours:
        other = threading.Thread(
            target=lambda: cuda.coefficients_of(wide(8) ** 2, args, torch.float32)
        )
        other.start()
        other.join()
        assert ours == []
        cuda.coefficients_of(wide(8) ** 2, args, torch.float32)
        assert [each.kernel.__name__ for each in ours] == ["coefficients_of"]


def test_a_function_prepares_nothing(runs: list[str]) -> None:
    """Its plan is for one call."""
    for _ in range(3):
        x = torch.randn(*IMAGES).to(DEVICE).requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared, "collecting", None)
            sync_batch_norm(x, process_group=Twice())[0].sum().backward()
    assert runs == []


def test_second_derivatives_are_the_verbs(runs: list[str]) -> None:
    layer = SyncBatchNorm(8, process_group=SingleProcess(), fuse_relu=True).to(DEVICE).double()
    _train(layer, dtype=torch.float64)
    x = wide(*IMAGES).requires_grad_()
    right = nn.BatchNorm2d(8).to(DEVICE).double()
    of: list[Any] = []
    for y in (layer(x), right(x).relu()):
        (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        of.append(torch.autograd.grad((dx**2).sum(), x)[0])
    torch.testing.assert_close(of[0], of[1])
