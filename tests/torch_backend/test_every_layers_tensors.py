"""The tensors that every layer takes, keeps and makes: one test for each promise."""

import ast
import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map_only

import multibn
from multibn.torch_backend import SyncBatchNorm, step_statistics, update_bn_stats
from multibn.torch_backend.layer.base import running_tensors
from multibn.torch_backend.reversible import ReversibleSequence
from tests.helpers import require
from tests.helpers.ranks import refusal, run_ranks
from tests.torch_backend.layer.test_modules import NESTED, nested
from tests.torch_backend.steps import checkpointed, saved
from tests.torch_backend.test_every_layer import (
    LAYERS,
    LOCAL,
    OF_SAMPLES,
    C,
    L,
    batch,
    every_layer,
    every_sharing_layer,
    make,
    norms,
    train,
    weights,
)

NEEDS = "torch"

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
}


@every_layer
def test_a_copy_is_the_same_layer_with_a_state_of_its_own(name: str) -> None:
    options = {"weighting": "rank", "running_var": "biased"}
    layer = make(name, **options)
    layer(batch())
    state = copy.deepcopy(layer.state_dict())
    others = {way: duplicate(layer) for way, duplicate in COPIES.items()}
    for way, other in others.items():
        for mine, its in zip(norms(layer), norms(other), strict=True):
            assert type(its) is type(mine), way
            assert its.norm_options == mine.norm_options, way
            assert name in OF_SAMPLES or vars(its.norm_options).items() >= options.items(), way
            assert type(its.process_group) is type(mine.process_group), way
            if way == "deepcopy" and name != "naive":
                assert its.process_group is mine.process_group
    found = {way: train(other, other, batch(seed=1)) for way, other in others.items()}
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    expected = train(layer, layer, batch(seed=1))
    for values in found.values():
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


@every_layer
def test_a_copy_has_no_part_in_a_step(name: str) -> None:
    layer = make(name)
    state = copy.deepcopy(layer.state_dict())
    with step_statistics(layer):
        layer(batch())
        twins = [duplicate(layer) for duplicate in COPIES.values()]
        for twin in twins:
            twin(batch())
        torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    for twin in twins:
        torch.testing.assert_close(twin.state_dict(), layer.state_dict())


@pytest.mark.parametrize("how", ["parameters", "attributes"])
@pytest.mark.parametrize("name", [*(LAYERS.keys() - {"group", "instance"}), "torch's"])
def test_running_statistics_need_not_be_buffers(name: str, how: str) -> None:
    build = partial(nn.BatchNorm1d, C, dtype=torch.float64)
    layer, twin = (build() if name == "torch's" else make(name) for _ in "ab")
    for module in layer.modules():
        for key, value in list(module._buffers.items()):
            delattr(module, key)
            if how == "attributes":
                module.__dict__[key] = value
            else:
                module.register_parameter(key, nn.Parameter(value, requires_grad=False))
    results: list[list[Tensor | None]] = []
    for model in (layer, twin):
        x = batch().requires_grad_()
        checkpointed(model, x).sum().backward()
        sum(ReversibleSequence([(model, nn.Identity())])(x, x)).sum().backward()
        with step_statistics(model) if norms(model) else contextlib.nullcontext():
            model(batch(seed=1))
        update_bn_stats(model, [batch(seed=2)], num_iters=1, progress=False)
        model(batch(seed=3))
        statistics = [t for module in model.modules() for t in running_tensors(module)]
        results.append([*statistics, x.grad, model.eval()(batch())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


WRONG_INPUTS: list[tuple[Any, Any, str]] = [
    (torch.ones(4, C + 1, L), ValueError, r"must have 3 channels in dimension 1.*got 4"),
    (torch.ones(4, 0, L), ValueError, r"must have channels: got 0 in shape \(., 0, .\)"),
    (torch.ones(4, C, L).long(), TypeError, "real floating-point dtype: got torch.int64"),
    (torch.ones(4, C, L).to(torch.complex64), TypeError, "dtype: got torch.complex64"),
    (torch.ones(4, C, L).to_sparse(), TypeError, r"dense tensor: got layout torch.sparse"),
    (np.ones((4, C, L)), TypeError, r"must be a torch\.Tensor: got ndarray"),
    (nested, TypeError, NESTED),
]

NO_DENSE_TENSORS = 5  # and those after


@every_sharing_layer
def test_a_wrong_input_on_one_rank_is_an_error_on_all(name: str) -> None:
    """It is one for the rank alone in evaluation. Afterwards the layer still works."""

    def run(communicator: Any) -> None:
        layer = make(name, process_group=communicator, dtype=torch.float32)
        good = batch(dtype=torch.float32)
        # What derived layers say in evaluation is their own class's matter.
        for training in (True, False) if "derived" not in name else (True,):
            layer.train(training)
            for k, (given, kind, message) in enumerate(WRONG_INPUTS):
                wrong, asks = (given(), "masked") if given is nested else (given, "derived")
                if k >= NO_DENSE_TENSORS and (name == asks or name in OF_SAMPLES):
                    continue  # its class asks the input for what only dense tensors have
                if communicator.rank == k % 2:
                    with pytest.raises(kind, match=message):
                        layer(wrong)
                elif training or name in OF_SAMPLES:
                    with pytest.raises(RuntimeError, match=rf"rejected on rank\(s\) \[{k % 2}\]"):
                        layer(good)
                assert layer(good).isfinite().all(), message

    run_ranks(2, run)


class Named(Tensor):
    """A subclass without operations of its own."""


class Wrapped(Tensor):
    """A tensor without numbers, whose operations are those of another tensor."""

    @staticmethod
    def __new__(cls, of: Tensor) -> Any:
        return cls._make_wrapper_subclass(cls, of.shape, dtype=of.dtype)

    def __init__(self, of: Tensor) -> None:
        self.of = of

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda v: v.of, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@every_sharing_layer
def test_a_tensor_that_wraps_another_on_one_rank_is_an_error_on_all(name: str) -> None:
    x = batch(dtype=torch.float32)
    wrappers = Wrapped(x), masked_tensor(x, x > 0)

    def run(communicator: Any) -> None:
        layer = make(name, process_group=communicator, dtype=torch.float32)
        for wrong in wrappers[: 1 if name == "masked" or name in OF_SAMPLES else 2]:
            message = f"must be a plain tensor: got a {type(wrong).__name__}, .* wrapped tensor"
            with refusal(communicator, 1, TypeError, message):
                layer(wrong if communicator.rank == 1 else x)
            for fine in (x.as_subclass(Named), nn.Parameter(x)):
                found, expected = layer(fine).as_subclass(Tensor), layer(x)
                if name != "renorm":  # which depends on the call before
                    torch.testing.assert_close(found, expected)

    run_ranks(2, run)
    split = make("split")
    with pytest.raises(TypeError, match=r"the input must be a plain tensor"):
        split(wrappers[0])


@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
@every_sharing_layer
def test_default_device_and_dtype_are_of_no_concern(name: str, default: torch.dtype) -> None:
    """Each tensor that the layer makes for itself is where the input is."""

    def run(communicator: Any, where: Any = None) -> list[Any]:
        layer, other = (make(name, communicator, torch.float32) for _ in "ab")
        x = batch(dtype=torch.float32)
        w = weights(x)
        with where or contextlib.nullcontext():
            y = layer(t := x.clone().requires_grad_())
            (dx,) = torch.autograd.grad(y, t, w, create_graph=True)
            (second,) = torch.autograd.grad(dx.pow(2).sum(), t)
            with step_statistics(other):
                other(x[: len(x) * communicator.rank])  # none on rank 0
            evaluated = [norm.eval()(x) for norm in (layer, other)]
        return [y, dx, second, *evaluated, layer.state_dict(), other.state_dict()]

    expected = run_ranks(2, run)
    torch.set_default_dtype(default)
    try:
        found = run_ranks(2, lambda communicator: run(communicator, torch.device("meta")))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_every_tensor_is_made_with_a_device_and_a_dtype() -> None:
    """Tensors that only a GPU's pass makes are among them; indices may have no dtype."""
    makers = [f"torch.{n}" for n in ("empty", "zeros", "ones", "full", "tensor", "arange")]
    package = Path(multibn.__file__).parent
    wrong = [
        f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}"
        for path in package.rglob("*.py")
        if not {"mvit", "parity"} & {*path.parts}  # models, which are built on the default device
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
        if not {None, "device"} & {keyword.arg for keyword in node.keywords}  # None: **options
        or not {None, "dtype"} & {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, wrong


@every_layer
def test_no_layer_keeps_another_tensor_of_the_inputs_size(name: str) -> None:
    """The backward pass needs the input, and a mask. A ReLU that is fused needs no other."""
    layer, x = make(name), batch(64)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x.requires_grad_())
    large = [t for t in saved if t.numel() >= 32 * L and t.dtype != torch.bool]
    pointers = {t.untyped_storage().data_ptr() for t in large}
    # Of their operations, and of weight and bias, which are not of the shape of the statistics.
    own = int(name.startswith("derived") or name in ("renorm", *OF_SAMPLES))
    assert len(pointers - {x.untyped_storage().data_ptr()}) == own
    masks = {t.untyped_storage().data_ptr() for t in saved if t.dtype == torch.bool}
    assert len(masks) == int(name.startswith("masked"))


@every_layer
def test_two_forward_passes_may_come_before_a_backward_pass(name: str) -> None:
    layer, a = make(name), batch().requires_grad_()
    first, _ = layer(a), layer(batch(6, seed=1))
    first.backward(weights(first))
    alone = batch().requires_grad_()
    y = make(name)(alone)
    y.backward(weights(y))
    torch.testing.assert_close(a.grad, alone.grad, rtol=0, atol=0)


def _resident(field: str) -> int:
    """Bytes of this process: now (VmRSS), or at most since the peak was reset (VmHWM)."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_step_needs_no_memory_beside_inputs_and_outputs(memory_format: Any) -> None:
    """Arrays of 33 MB or more go back to the system at once, and so are counted."""
    require.need("core")
    x, dy = (torch.randn(48, 64, 64, 64).to(memory_format=memory_format) for _ in "ab")
    x.requires_grad_()
    layer = SyncBatchNorm(64, process_group=LOCAL)
    for _ in range(2):  # the first step loads code
        x.grad = None
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
        y = layer(x)
        after = _resident("VmRSS")
        forward = (_resident("VmHWM") - before) / x.nbytes
        Path("/proc/self/clear_refs").write_text("5")
        y.backward(dy)
        backward = (_resident("VmHWM") - after) / x.nbytes
        kept = (after - before) / x.nbytes
        del y
    assert max(forward, kept, backward) < 1.05, (forward, kept, backward)
