"""Layer calls made up at random: each is right, or one documented error on every rank.

`make fuzz` makes 10,000 of them; MULTIBN_FUZZ says how many each of the tests makes.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.torch_backend import SyncBatchNorm
from tests.fuzz import calls as fuzz
from tests.fuzz import judging
from tests.fuzz.calls import Activation, Call
from tests.fuzz.judging import Step
from tests.helpers.ranks import ThreadCommunicator, run_ranks

import chainer  # # isort: skip (multibn makes it importable)

NEEDS = "torch chainer"

MANY = "MULTIBN_FUZZ" in os.environ
several = settings(
    max_examples=fuzz.CALLS,
    deadline=None,
    database=None,
    derandomize=not MANY,
    # A smaller call that fails, too, takes a minute to find.
    phases=[phase for phase in Phase if MANY or phase is not Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

# NumPy tells of overflow and NaN by warnings, on the way to the error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(7200 if MANY else 300),
]


def steps(call: Call, run: Callable[[Call, int, ThreadCommunicator], Step]) -> list[Step]:
    def on_rank(communicator: ThreadCommunicator) -> Step:
        return run(call, communicator.rank, communicator)

    with fuzz.kernels_used(call.reference):
        return run_ranks(len(call.ranks), on_rank)


def torch_input(
    a: Activation, layout: str, kind: str, rng: np.random.Generator, mask: Any = None
) -> torch.Tensor:
    """A tensor of that layout; torch has no negative strides, but views that are negated."""
    x = torch.from_numpy(fuzz.padded(np.array(fuzz.values(kind, a.shape, rng)), a, mask, rng))
    x = x.to(getattr(torch, a.dtype))
    if layout == "flipped":
        is_signed = x.dtype not in (torch.bool, torch.uint8)
        return (
            torch._neg_view(torch.where(x == 0, x, -x) if x.is_complex() else -x)
            if is_signed
            else x
        )
    if layout == "dense" and x.ndim in (4, 5) and rng.random() < 0.5:
        fmt = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=fmt)
    is_bfloat16 = x.dtype == torch.bfloat16  # which NumPy lacks
    bits = fuzz.laid_out((x.view(torch.int16) if is_bfloat16 else x).numpy(), layout, rng)
    return torch.from_numpy(bits).view(x.dtype)


def as_numpy(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    t = t.detach().resolve_neg()
    return t.numpy().copy() if t.is_complex() else t.double().numpy().copy()


def torch_step(call: Call, rank: int, communicator: ThreadCommunicator) -> Step:
    a = call.ranks[rank]
    rng = np.random.default_rng((call.seed, rank))
    common = np.random.default_rng(call.seed)
    bn: Any = SyncBatchNorm(
        call.num_channels,
        eps=call.eps,
        momentum=call.momentum,
        affine=call.parameters[0],
        track_running_stats=call.tracked,
        process_group=communicator,
        dtype=getattr(torch, call.parameter_dtype),
        bias=call.parameters[1],
        weighting=call.weighting,  # type: ignore[arg-type]
        running_var=call.running_var,  # type: ignore[arg-type]
    ).train(call.train)
    needs_x, *needs = call.needs
    with torch.no_grad():
        for parameter, needed in zip((bn.weight, bn.bias), needs, strict=True):
            if parameter is not None:
                parameter.copy_(torch.from_numpy(common.normal(size=call.num_channels)))
                parameter.requires_grad_(needed)
        if call.tracked:
            bn.running_mean.copy_(torch.from_numpy(common.normal(size=call.num_channels)))
            bn.running_var.copy_(torch.from_numpy(common.uniform(0.5, 2, call.num_channels)))
    mask = fuzz.mask_of(a, rng)
    told = {} if mask is None else {"mask": torch.from_numpy(mask)}
    x = torch_input(a, a.layout, a.values, rng, mask)
    if needs_x and (x.is_floating_point() or x.is_complex()):
        x.requires_grad_()
    buffers = [b.clone() for b in bn.buffers()]
    step = Step(as_numpy(x), weight=as_numpy(bn.weight), bias=as_numpy(bn.bias), mask=mask)
    given = [t.detach().clone() for t in (x, *bn.parameters())]
    running = (bn.running_mean, bn.running_var) if call.tracked else ()
    step.before = tuple(as_numpy(b) for b in running)
    try:
        y = bn(x, **told)
        step.y = as_numpy(y)
        assert y.dtype == x.dtype
        if y.requires_grad and call.train:
            dy = torch_input(a, call.dy_layout, call.dy_values, rng)
            step.dy = as_numpy(dy)
            y.backward(dy)
            assert np.array_equal(as_numpy(dy), step.dy, equal_nan=True)
            step.dx = as_numpy(x.grad)
            step.dweight, step.dbias = (
                None if p is None else as_numpy(p.grad) for p in (bn.weight, bn.bias)
            )
    except Exception as error:
        step.error = error
        if step.y is None and not all(
            torch.equal(b, c) for b, c in zip(bn.buffers(), buffers, strict=True)
        ):
            step.changed = "buffers"
    step.after = tuple(as_numpy(b) for b in running)
    for t, before in zip((x, *bn.parameters()), given, strict=True):
        same = torch.equal(t.detach(), before) or (torch.equal(
            t.detach().isnan(), before.isnan()
        ) and torch.equal(t.detach().nan_to_num(), before.nan_to_num()))  # fmt: skip
        step.changed = step.changed or ("" if same else "the input or a parameter")
    return step


TORCH = fuzz.calls(("float32", "float64", "float16", "bfloat16"))


@several
@given(TORCH)
def test_a_call_of_torch_is_right_or_a_documented_error(call: Call) -> None:
    judging.judge(call, steps(call, torch_step), gradients_are_means=False)


def chainer_step(call: Call, rank: int, communicator: ThreadCommunicator) -> Step:
    a = call.ranks[rank]
    rng = np.random.default_rng((call.seed, rank))
    common = np.random.default_rng(call.seed)
    link: Any = MultiNodeBatchNormalization(
        call.num_channels,
        communicator,
        decay=1 - (0.1 if call.momentum is None else call.momentum),
        eps=call.eps,
        dtype=call.parameter_dtype,
        use_gamma=call.parameters[0],
        use_beta=call.parameters[1],
        weighting=call.weighting,  # type: ignore[arg-type]
        avg_var=call.running_var,  # type: ignore[arg-type]
    )
    for parameter in (link.gamma, link.beta):
        if parameter is not None:
            parameter.array[...] = common.normal(size=call.num_channels)
    link.avg_mean[...] = common.normal(size=call.num_channels)
    link.avg_var[...] = common.uniform(0.5, 2, call.num_channels)
    link.cleargrads()  # they begin as NaN
    mask = fuzz.mask_of(a, rng)
    data = chainer_input(a, a.layout, a.values, rng, mask)
    x = chainer.Variable(data, requires_grad=call.needs[0]) if call.needs[1] else data
    parameters = [p for p in (link.gamma, link.beta) if p is not None]
    given = [data.copy(), *(p.array.copy() for p in parameters)]
    step = Step(data.astype("complex128" if data.dtype.kind == "c" else "float64"), mask=mask)
    step.weight, step.bias = (
        None if p is None else p.array.astype("f8") for p in (link.gamma, link.beta)
    )
    step.before = (link.avg_mean.astype("f8"), link.avg_var.astype("f8"))
    with np.errstate(all="ignore"), chainer.using_config("train", call.train):
        try:
            y = link(x, finetune=call.momentum is None, mask=mask)
            step.y = y.array.astype("f8")
            assert y.dtype == data.dtype
            if call.train and call.needs[1]:
                y.grad = dy = chainer_input(a, call.dy_layout, call.dy_values, rng)
                step.dy = dy.astype("f8")
                y.backward()
                assert np.array_equal(dy, step.dy.astype(dy.dtype), equal_nan=True)
                step.dx = None if x.grad is None else x.grad.astype("f8")
                step.dweight, step.dbias = (
                    None if p is None or p.grad is None else p.grad.astype("f8")
                    for p in (link.gamma, link.beta)
                )
        except Exception as error:
            step.error = error
            if step.y is None and link.N:
                step.changed = "N"
    step.after = (link.avg_mean.astype("f8"), link.avg_var.astype("f8"))
    for t, before in zip((data, *(p.array for p in parameters)), given, strict=True):
        if t.tobytes() != before.tobytes():
            step.changed = step.changed or "the input or a parameter"
    return step


def chainer_input(
    a: Activation, layout: str, kind: str, rng: np.random.Generator, mask: Any = None
) -> Any:
    x = fuzz.padded(np.array(fuzz.values(kind, a.shape, rng)), a, mask, rng)
    if np.dtype(a.dtype).kind in "iub":
        x = np.nan_to_num(x)
    with np.errstate(all="ignore"):
        dense = x.astype(a.dtype)
    x = fuzz.laid_out(np.asarray(dense), layout, rng)
    if rng.random() < 0.2:
        x.flags.writeable = False
    return x


CHAINER = fuzz.calls(("float32", "float64", "float16"))


@several
@given(CHAINER)
def test_a_call_of_chainer_is_right_or_a_documented_error(call: Call) -> None:
    judging.judge(call, steps(call, chainer_step), gradients_are_means=True)
