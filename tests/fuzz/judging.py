"""What must come of a layer call that was made up at random (see `fuzz`).

`judge` says from the float64 reference what is right: numbers within the bound that the dtypes
allow, or one documented error on every rank, and nothing that was passed in is changed.
"""

import linecache
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import multibn
from multibn.engine.statistics import OneValueError
from multibn.parity import oracle
from tests.fuzz.calls import FLOATS, Activation, Call

Array = NDArray[Any]

ERRORS = (TypeError, ValueError, RuntimeError, FloatingPointError)
_PACKAGE = str(Path(multibn.__file__).parent)


@dataclass
class Step:
    """What one rank has found, as float64 arrays; `error` instead, if there was one."""

    x: Array
    error: Exception | None = None
    y: Array | None = None
    dy: Array | None = None
    dx: Array | None = None
    dweight: Array | None = None
    dbias: Array | None = None
    weight: Array | None = None
    bias: Array | None = None
    before: tuple[Array, ...] = ()  # running mean and variance
    after: tuple[Array, ...] = ()
    changed: str = ""  # what was passed in and is not as it was
    mask: Array | None = None
    num_samples: int | None = None  # that have an element which counts; None without a mask


def kind(error: BaseException | None) -> Any:
    """Its documented type."""
    return ValueError if isinstance(error, OneValueError) else type(error)


def said_by_multibn(error: BaseException) -> bool:
    """Whether `error` is of a documented type, and of a `raise` statement of multibn's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if kind(error) not in ERRORS or trace is None:
        return False
    where = trace.tb_frame.f_code.co_filename
    line = linecache.getline(where, trace.tb_lineno).strip()
    return where.startswith(_PACKAGE) and line.startswith("raise ")


# Which errors a call may end with, on the ranks that are at fault and on the others.
def expected_errors(call: Call, steps: list[Step]) -> list[tuple[type[Exception], ...]]:
    """The errors of each rank; () where there may be none."""
    refused = [_refused(call, a) for a in call.ranks]
    if not call.train:
        own = zip(refused, steps, call.ranks, strict=True)
        return [error or _expected_alone(step, a.dtype == "float16") for error, step, a in own]
    if any(refused):
        return [error or (RuntimeError,) for error in refused]
    size = len(steps)
    if len({a.dtype for a in call.ranks}) > 1:
        return [(RuntimeError,)] * size
    if not all(np.isfinite(step.x).all() for step in steps):
        return [() if _skips(call) else (FloatingPointError,)] * size
    if sum(step.x[:, 0].size for step in steps) == 1 or _is_masked_out(steps):
        return [(ValueError,)] * size
    return [()] * size


def _skips(call: Call) -> bool:
    """Whether layers skip a batch that is not finite: by default, in float16."""
    return {a.dtype for a in call.ranks} == {"float16"}


def _expected_alone(step: Step, skips: bool) -> tuple[type[Exception], ...]:
    """The errors of an evaluation. Without averages, a rank's batch has its own statistics."""
    if step.before:
        return ()
    if not np.isfinite(step.x).all():
        return () if skips else (FloatingPointError,)
    return (ValueError,) if step.x[:, 0].size == 1 or _is_masked_out([step]) else ()


def _is_masked_out(steps: list[Step]) -> bool:
    """Whether there are masks that leave no element of a batch that has any."""
    has_any = any(step.mask is not None and step.mask.size for step in steps)
    return has_any and not any(step.x.size for step in steps)


def _refused(call: Call, a: Activation) -> tuple[type[Exception], ...]:
    if len(a.shape) < 2 or a.shape[1] != call.num_channels:
        return (ValueError,) if _is_floating(a.dtype) else (ValueError, TypeError)
    return () if _is_floating(a.dtype) else (TypeError,)


def _is_floating(dtype: str) -> bool:
    return dtype in (*FLOATS, "bfloat16")


def precision(dtype: str) -> float:
    """Unit roundoff."""
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}.get(dtype, 2.0**-24)


def _largest(dtype: str) -> float:
    if dtype == "bfloat16":
        return 3.3e38
    return float(np.finfo(dtype).max)


def _smallest(dtype: str) -> float:
    return 1e-40 if dtype == "bfloat16" else float(np.finfo(dtype).smallest_subnormal)


K = 64  # rounding errors that may add up


def judge(call: Call, steps: list[Step], gradients_are_means: bool) -> None:
    """Raises AssertionError unless the call is right, or ends in the errors that it should."""
    errors = [step.error for step in steps]
    steps = [_of_elements(step) for step in steps]
    for step in steps:
        assert not step.changed, step.changed
    for rank, error in enumerate(errors):
        if error is not None:
            assert said_by_multibn(error), "".join(traceback.format_exception(error))
            assert str(error).endswith("."), error
            assert steps[rank].y is None, "an error in the backward pass"
            assert all(map(np.array_equal, steps[rank].before, steps[rank].after)), "half-written"
    expected = expected_errors(call, steps)
    if (
        call.train
        and _may_overflow(call, steps)
        and any(type(e) is FloatingPointError for e in errors)
    ):
        assert all(type(e) is FloatingPointError for e in errors), errors
        return
    for rank, (error, types) in enumerate(zip(errors, expected, strict=True)):
        if not call.train and type(error) is FloatingPointError and _may_overflow(call, steps):
            continue
        if types:
            assert kind(error) in types, (rank, types, error)
        else:
            assert error is None, (rank, error)
    if any(errors) and (call.train or all(errors)):
        return
    if call.train and not all(np.isfinite(step.x).all() for step in steps):
        for step in steps:
            _check_skipped(step)
    elif call.train:
        _compare_training(call, steps, gradients_are_means)
    if call.train:
        return
    for step, a in zip(steps, call.ranks, strict=True):
        if step.error is not None:
            continue
        if not step.before and not np.isfinite(step.x).all():
            _check_skipped(step)
            continue
        if not step.before:
            alone = replace(call, ranks=(a,), weighting="element")
            _compare_training(alone, [step], gradients_are_means)
            continue
        # Chainer's own pass rounds what it makes of the averages to their dtype.
        u = max(precision(a.dtype), precision(call.parameter_dtype) if gradients_are_means else 0)
        _compare_evaluation(call, step, a, u)


def _check_skipped(step: Step) -> None:
    assert step.y is not None
    assert np.isnan(step.y).all(), "a batch is skipped, but for an output"
    assert step.dx is None or np.isnan(step.dx).all()
    assert all(map(np.array_equal, step.before, step.after)), "skipped, and moved"


def _of_elements(step: Step) -> Step:
    """The step without a mask: the elements that count as samples, `(elements, C)`."""
    mask = step.mask
    if mask is None:
        return step
    for a in (step.y, step.dx):
        assert a is None or not np.moveaxis(a, 1, -1)[~mask].any(), "not 0 where a mask is False"
    names = ("x", "y", "dy", "dx")
    arrays = {name: getattr(step, name) for name in names if getattr(step, name) is not None}
    chosen = {name: np.moveaxis(a, 1, -1)[mask] for name, a in arrays.items()}
    return replace(step, num_samples=sum(map(np.any, mask)), **chosen)


def _may_overflow(call: Call, steps: list[Step]) -> bool:
    """Squares that the dtype of the arithmetic cannot hold."""
    largest = max((np.abs(s.x).max() for s in steps if s.x.size), default=0.0)
    wide = all(a.dtype == "float64" for a in call.ranks)
    return bool(largest > (1e150 if wide else 1e17))


def _compare_training(call: Call, steps: list[Step], means: bool) -> None:
    xs = [step.x for step in steps]
    count = sum(x[:, 0].size for x in xs)
    C = call.num_channels
    if count == 0:
        for step in steps:
            assert step.y is not None
            assert step.y.shape == step.x.shape
            assert all(np.array_equal(*pair) for pair in zip(step.before, step.after, strict=True))
        return
    first = steps[0]
    weight = np.ones(C) if first.weight is None else first.weight
    bias = np.zeros(C) if first.bias is None else first.bias
    dys = [np.zeros(s.x.shape) if s.dy is None else s.dy for s in steps]
    finite = [np.nan_to_num(dy) for dy in dys]
    num_samples = [len(s.x) if s.num_samples is None else s.num_samples for s in steps]
    want = oracle.batch_norm(
        xs, finite, weight, bias, eps=call.eps, weighting=call.weighting, num_samples=num_samples
    )
    dtype = call.ranks[0].dtype
    out, u = precision(dtype), min(precision(dtype), 2.0**-24)
    mean, var = want.mean, want.var
    d = np.max([_channel_max(np.abs(x - _along(mean, x))) for x in xs if x.size], axis=0)
    # The variance goes over the ranks as a mean of squares, 53 bits of that, or about the mean.
    lost = mean**2 * 2.0 ** (-13 if dtype == "float64" else -27) > 2 * (var + call.eps)
    dvar = K * (2.0**-53 * (np.where(lost, 0, mean**2) + var) + u * d**2 + 2.0**-149)
    condition = dvar / (var + call.eps)
    if (condition > 0.1).any():
        assert all(np.isfinite(step.y).all() for step in steps if step.y is not None)
        return
    s = 1 / np.sqrt(var + call.eps)
    xhat = d * s
    dxhat = K * u * (xhat + 1) + condition * xhat + K * (u * u + 2.0**-53) * np.abs(mean) * s
    tiny = _smallest(dtype)
    nan = np.any([_channel_max(np.isnan(dy)) for dy in dys if dy.size], axis=0)
    g = np.max([_channel_max(np.abs(dy)) for dy in finite if dy.size], axis=0)
    for rank, (step, x) in enumerate(zip(steps, xs, strict=True)):
        y = want.y[rank]
        bound = _along(dxhat * np.abs(weight) + K * u * np.abs(bias) + tiny, x)
        _close(f"y on rank {rank}", step.y, y, dtype, bound + 2 * out * np.abs(y))
        if step.dx is not None and x.size:
            dx = want.dx[rank]
            share = 1.0 if call.weighting == "element" else count / x[:, 0].size
            error = (
                np.abs(weight) * s * g * (1 + share * (1 + xhat**2)) * (K * u + condition + dxhat)
            )
            got = _without(nan, step.dx, dx)
            bound = _along(error + tiny, x) + 2 * out * np.abs(dx)
            _close(f"dx on rank {rank}", got, dx, dtype, bound)
        n = count if means else x[:, 0].size
        last = precision(call.parameter_dtype)
        parts_w = finite[rank] * (x - _along(mean, x)) * _along(s, x)
        parts_w = parts_w.sum(axis=_reduced(x))
        parts_b = finite[rank].sum(axis=_reduced(x))
        if means:
            parts_w, parts_b = want.dweight / len(steps), want.dbias / len(steps)
        own_nan = nan if means else _channel_max(np.isnan(dys[rank])) if x.size else nan & False
        for name, gradient, sums, error in (
            ("dweight", step.dweight, parts_w, n * g * (xhat * (K * u + condition) + dxhat)),
            ("dbias", step.dbias, parts_b, n * g * K * u),
        ):
            if gradient is not None:
                smallest = _smallest(call.parameter_dtype)
                bound = error + 2 * last * np.abs(sums) + smallest
                keep = ~own_nan
                what = f"{name} on rank {rank}"
                _close(what, gradient[keep], sums[keep], call.parameter_dtype, bound[keep])
    _compare_running(call, steps, mean, var, dvar, K * (2.0**-53 * np.abs(mean) + u * d), count)


def _compare_running(
    call: Call, steps: list[Step], mean: Array, var: Array, dvar: Array, dmean: Array, count: int
) -> None:
    momentum = 1.0 if call.momentum is None else call.momentum
    for rank, step in enumerate(steps):
        if not step.before:
            continue
        m = step.x[:, 0].size or count
        factor = {
            "unbiased_global": count / max(count - 1, 1),
            "unbiased_local": m / max(m - 1, 1),
            "biased": 1.0,
        }[call.running_var]
        before = (step.before[0], step.before[1])
        want = oracle.running(before, mean, var, factor, momentum)
        last = precision(call.parameter_dtype)
        # About a mean that is off by dmean, the oracle's too, the variance is larger by dmean**2.
        errors = dmean, 2 * (dvar + dmean**2)
        for name, got, new, error in zip(("mean", "var"), step.after, want, errors, strict=True):
            bound = error + 2 * last * np.abs(new) + 2 * _smallest(call.parameter_dtype)
            _close(f"running {name} on rank {rank}", got, new, call.parameter_dtype, bound)


def _compare_evaluation(call: Call, step: Step, a: Activation, u: float) -> None:
    mean, var = step.before
    assert np.array_equal(mean, step.after[0])
    assert np.array_equal(var, step.after[1])
    x = step.x
    weight = np.ones_like(mean) if step.weight is None else step.weight
    bias = np.zeros_like(mean) if step.bias is None else step.bias
    s = weight / np.sqrt(var + call.eps)
    with np.errstate(invalid="ignore", over="ignore"):
        y = (x - _along(mean, x)) * _along(s, x) + _along(bias, x)
        size = (np.abs(x) + _along(np.abs(mean), x)) * _along(np.abs(s), x)
    bound = K * u * (size + _along(np.abs(bias), x)) + K * _smallest(a.dtype)
    assert step.y is not None
    keep = np.isfinite(x) & (size < _largest(a.dtype) / 8)
    _close("y in evaluation", step.y[keep], y[keep], a.dtype, bound[keep])


def _close(what: str, got: Array | None, want: Array, dtype: str, bound: Array) -> None:
    assert got is not None, f"there is no {what}"
    assert got.shape == want.shape, (what, got.shape, want.shape)
    small = np.abs(want) + bound < 0.9 * _largest(dtype)  # others may round to infinity
    with np.errstate(invalid="ignore"):
        good = (np.abs(got - want) <= bound) | ~small
    assert not np.isnan(got).any(), f"NaN in {what}"
    wrong = got[~good][:3], want[~good][:3], np.broadcast_to(bound, want.shape)[~good][:3]
    assert good.all(), f"{what}: got, wanted and bound are {wrong}"


def _without(nan: Array, got: Array, want: Array) -> Array:
    """The channels whose gradient came with NaN set to what is wanted; all others must be fine."""
    mask = np.broadcast_to(_along(nan, got), got.shape)
    return np.where(mask, want, got)


def _reduced(x: Array) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != 1)


def _channel_max(x: Array) -> Array:
    largest: Array = x.max(axis=_reduced(x))
    return largest


def _along(v: Array, x: Array) -> Array:
    return v.reshape(1, -1, *[1] * (x.ndim - 2))
