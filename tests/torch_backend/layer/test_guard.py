"""The guard of a layer's plans: each row of its table is changed between two steps."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from multibn import torch_backend as tb
from multibn.engine.running import StepAccumulator
from multibn.kernels import NormArgs, Running
from multibn.torch_backend.layer.autograd import plan_key
from tests.helpers.spread import OTHERS
from tests.torch_backend.convert.test_class_swap import Activated2d

NEEDS = "torch"


def _input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 3, 5, 5)), requires_grad=True)


def _layer() -> tb.SyncBatchNorm:
    return tb.SyncBatchNorm(3, fuse_relu=True)


def _set(**attributes: Any) -> Callable[[tb.SyncBatchNorm], object]:
    def change(layer: tb.SyncBatchNorm) -> None:
        for name, value in attributes.items():
            setattr(layer, name, value)

    return change


def _same(layer: tb.SyncBatchNorm) -> None:
    """Change nothing of the layer."""


# Each option gets another value.
_CHANGED = {
    name: _set(**{tb.SyncBatchNorm.Options.attributes.get(name, name): values[0]})
    for name, values in OTHERS.items()
}
# A row of the guard; what is changed of the layer; and the next input, with a residual perhaps.
CHANGES: dict[str, tuple[Callable[[tb.SyncBatchNorm], object], Callable[[], Any]]] = {
    **{name: (change, lambda: (_input(),)) for name, change in _CHANGED.items()},
    "shape": (_same, lambda: (_input(6, 3, 5, 5),)),
    "strides": (_same, lambda: (_input().to(memory_format=torch.channels_last),)),
    "dtype": (_same, lambda: (_input().double(),)),
    "requires_grad": (_same, lambda: (_input().detach(),)),
    "residual": (_same, lambda: (_input(), _input())),
    "fuse_relu": (_set(fuse_relu=False), lambda: (_input(),)),
    "weight": (lambda layer: layer.weight.data.mul_(2).double(), lambda: (_input(),)),
    "dtype of parameters": (lambda layer: layer.double(), lambda: (_input(),)),
    "affine": (_set(weight=None, bias=None), lambda: (_input(),)),
    "bias": (_set(bias=None), lambda: (_input(),)),
    "momentum": (_set(momentum=None), lambda: (_input(),)),
    "nonfinite": (_set(nonfinite="skip"), lambda: (torch.nan * _input(),)),
    "track_running_stats": (_set(running_mean=None, running_var=None), lambda: (_input(),)),
    "their dtype": (_set(running_var=torch.ones(3).double()), lambda: (_input(),)),
}
# Rows with plans of their own. A weight of another value has the plan of the one before.
_OPTIONS = OTHERS.keys() - {"track_running_stats"}


@pytest.mark.filterwarnings("ignore:.*has skipped a batch")
@pytest.mark.parametrize("row", CHANGES)
def test_a_change_between_two_steps_is_seen(row: str) -> None:
    change, make = CHANGES[row]
    layer = _layer()
    for _ in range(2):
        layer(_input())
    plans = layer.layer_communicator.plans
    assert len(plans) == 1
    change(layer)
    fresh, arguments = copy.deepcopy(layer), make()
    assert not fresh.layer_communicator.plans
    y, expected = layer(*arguments), fresh(*arguments)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    now = layer.layer_communicator.plans
    assert (now is plans) == (row not in _OPTIONS)
    assert len(now) == 1 + (now is plans and row != "weight")
    for name, buffer in fresh.named_buffers():
        assert torch.equal(layer.get_buffer(name), buffer), name


_X, _C = torch.ones(4, 3, 5), torch.ones(3)
_ARGS = NormArgs(_X, _C, _C, 1e-5, (0, 2), running=Running(_C, _C, 0.1))


def _unlike(a: Tensor) -> list[Tensor]:
    """Tensors that differ from `a` in one of shape, dtype and device."""
    return [torch.ones(2, *a.shape[1:]), a.double(), a.to("meta")]


_nests = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@_nests
def test_each_part_of_a_key_tells_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[dict[str, Any]] = [
        {},
        *({"x": x} for x in (*_unlike(_X), torch.ones(4, 5, 3).mT, _X.clone().requires_grad_())),
        *({"eps": 0.5}, {"axis": (0,)}, {"relu": True}, {"mask": _X > 0}),
        *({name: v} for name in ("weight", "bias") for v in (*_unlike(_C), nn.Parameter(_C), None)),
        {"weight": None, "bias": None},
        *({"running": _ARGS.running._replace(mean=v)} for v in _unlike(_C)),
        *({"running": _ARGS.running._replace(var=v)} for v in _unlike(_C)),
        *({"running": None}, {"running": StepAccumulator(_C)}),
        *(
            {"residual": residual}
            for residual in (_X, *_unlike(_X), torch.nested.nested_tensor([_C]))
        ),
    ]
    keys = [plan_key(_ARGS._replace(**each), "element") for each in others]
    keys.append(plan_key(_ARGS, "rank"))
    ddp: Any = nn.Identity()  # stands for the wrapper whose forward pass runs
    ddp._join_config = SimpleNamespace(enable=False)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", ddp)
    keys.append(plan_key(_ARGS, "element"))
    assert None not in keys
    assert len({*keys}) == len(keys)


class _Subclass(Tensor):
    pass


@_nests
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")  # with torch 2.13
def test_what_a_plan_is_not_made_for_has_no_key() -> None:
    found: list[Any] = []

    def look(x: Tensor) -> Tensor:
        found.append(plan_key(_ARGS, "element"))
        return x

    sparse, subclass = _X.to_sparse(), _X.as_subclass(_Subclass)
    nested = torch.nested.nested_tensor([_C])
    found += (plan_key(_ARGS._replace(x=x), "element") for x in (sparse, subclass, nested))
    found += (plan_key(_ARGS._replace(residual=r), "element") for r in (sparse, subclass))
    torch.func.vmap(look)(_X)
    make_fx(look)(_X)
    torch.jit.trace(look, _X, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        look(_X)
    assert found == [None] * 9
    look(_X)
    assert found[-1] is not None


def test_grad_mode_is_seen() -> None:
    layer, x = _layer(), _input()
    for context in (nullcontext(), torch.no_grad(), nullcontext(), torch.inference_mode()):
        with context:
            y = layer(x)
        assert y.requires_grad is isinstance(context, nullcontext)
    assert len(layer.layer_communicator.plans) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eps": -1.0}, "`eps` must be"),
        ({"weight": nn.Parameter(torch.ones(4))}, "`weight` must have shape"),
        ({"bias": nn.Parameter(torch.ones(3, device="meta"))}, "`bias` must be on the device"),
        ({"running_mean": torch.ones(4)}, r"`running_mean` must have shape \(3,\), a number for"),
        ({"running_var": torch.ones(4)}, r"`running_var` must have shape \(3,\), a number for"),
        ({"running_var": torch.ones(3, dtype=torch.int64)},
         r"and a floating-point dtype: got \(3,\) and torch.int64"),
    ],
)  # fmt: skip
def test_what_became_wrong_after_a_step_is_refused(wrong: dict[str, Any], message: str) -> None:
    layer = _layer()
    layer(_input())
    _set(**wrong)(layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            layer(_input())


def test_ever_new_inputs_keep_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multibn.communicators.layer_communicator.MAX_PLANS", 3)
    layer = _layer()
    for n in range(2, 12):
        layer(_input(n, 3, 5))
        assert len(layer.layer_communicator.plans) <= 3


def _masked() -> Callable[[Tensor], Tensor]:
    layer = _layer()
    return lambda x: layer(x, mask=torch.ones(4, 5, 5, dtype=torch.bool))


WAYS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "a layer": _layer,
    "a mask": _masked,
    "a converted layer with its own forward": lambda: tb.convert_sync_batchnorm(Activated2d(3)),
    "the parts of convert_sub_batchnorm": lambda: tb.convert_sub_batchnorm(nn.BatchNorm2d(3), 2),
    "SubBatchNorm2d": lambda: tb.SubBatchNorm2d(num_splits=2, num_features=3),
    "NaiveSyncBatchNorm2d": lambda: tb.NaiveSyncBatchNorm2d(num_features=3),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_step_prepares_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = WAYS[way](), _input()
    expected = step(x)
    monkeypatch.setattr("multibn.torch_backend.layer.validation.validate_call", None)
    monkeypatch.setattr("multibn.torch_backend.layer.functional.Plan", None)
    torch.testing.assert_close(step(x), expected)


def test_the_same_input_with_a_mask_has_a_plan_of_its_own() -> None:
    layer, x = _layer(), _input()
    first = layer(x)
    mask = torch.zeros(4, 5, 5, dtype=torch.bool)
    mask[:2] = True
    torch.testing.assert_close(layer(x, mask=mask)[:2], layer(x[:2]))
    torch.testing.assert_close(layer(x), first)
    assert len(layer.layer_communicator.plans) == 3
