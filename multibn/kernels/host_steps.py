"""The steps between the passes for host memory, compiled by numba: one call each.

A layer's step has dozens of operations on a few numbers, which would take longer one by one than
the passes over a small activation. `generic` says what each step does, and does it for arrays that
the loops cannot take.
"""

from functools import cache
from math import prod
from typing import Any

from multibn._typing import Array
from multibn.kernels import _loops, _step_loops, generic
from multibn.kernels._memory import library, wide_addresses
from multibn.kernels._step_loops import NOT_FINITE, REFUSED
from multibn.kernels.generic import Unpacked


def pack(mean: Array, meansqr: Array, weight: float, count: float, /) -> Array:
    """As `generic.pack`."""
    of = library(mean)
    given = wide_addresses(of, (mean, meansqr))
    if given is None:
        return generic.pack(mean, meansqr, weight, count)
    C = prod(mean.shape)
    (packed,), made = of.new(1, (2 * C + 2,), of.float64)
    _loop("pack", "float64")(*given, *made, C, weight, count)
    return packed


def unpack(summed: Array, shape: tuple[int, ...], weight: float, count: float, /) -> Unpacked:
    """As `generic.unpack`."""
    of = library(summed)
    given = wide_addresses(of, (summed,))
    if given is None:
        return generic.unpack(summed, shape, weight, count)
    (mean, var), made = of.new(2, shape, of.float64)
    (of_all, element_weight), more = of.new(2, (), of.float64)
    found = _loop("unpack", "float64")(*given, *made, *more, prod(shape), weight, count)
    return Unpacked(mean, var, of_all, element_weight, found == REFUSED, found != NOT_FINITE)


def affine(
    var: Array, weight: Array | None, bias: Array | None, /, *, eps: float
) -> tuple[Array, Array]:
    """As `generic.affine`."""
    of = library(var)
    given = wide_addresses(of, (var,))
    parameters = _parameters(of, var.shape, weight, bias)
    if given is None or parameters is None:
        return generic.affine(var, weight, bias, eps=eps)
    dtype, addresses, _kept = parameters
    (scale, shift), made = of.new(2, var.shape, of.float64)
    _loop("affine", dtype)(
        *given,
        *addresses,
        *made,
        prod(var.shape),
        weight is not None,
        bias is not None,
        eps,
    )
    return scale, shift


def over_std(v: Array, var: Array, /, *, eps: float) -> Array:
    """As `generic.over_std`."""
    of = library(var)
    given = wide_addresses(of, (v, var))
    if given is None:
        return generic.over_std(v, var, eps=eps)
    (quotient,), made = of.new(1, var.shape, of.float64)
    _loop("over_std", "float64")(*given, *made, prod(var.shape), eps)
    return quotient


def gradient_coefficients(
    var: Array,
    weight: Array | None,
    element_weight: Array,
    sum_dy: Array,
    sum_dy_xhat: Array,
    /,
    *,
    eps: float,
) -> tuple[Array, Array, Array]:
    """As `generic.gradient_coefficients`."""
    of = library(var)
    given = wide_addresses(of, (var, sum_dy, sum_dy_xhat))
    parameters = _parameters(of, var.shape, weight)
    if given is None or parameters is None:
        return generic.gradient_coefficients(
            var, weight, element_weight, sum_dy, sum_dy_xhat, eps=eps
        )
    dtype, addresses, _kept = parameters
    (dy_scale, x_scale, shift), made = of.new(3, var.shape, of.float64)
    _loop("gradient_coefficients", dtype)(
        *given,
        *addresses,
        *made,
        prod(var.shape),
        weight is not None,
        eps,
        float(element_weight),
    )
    return dy_scale, x_scale, shift


def move_averages(
    running_mean: Array,
    running_var: Array,
    mean: Array,
    var: Array,
    momentum: float | Array,
    factor: float | Array,
    /,
) -> tuple[Array, Array]:
    """As `generic.move_averages`."""
    of = library(mean)
    given = wide_addresses(of, (mean, var))
    running = _parameters(of, mean.shape, running_mean, running_var)
    if given is None or running is None or running[0] != _name(running_mean.dtype):
        return generic.move_averages(running_mean, running_var, mean, var, momentum, factor)
    dtype, addresses, _kept = running
    (new_mean, new_var), made = of.new(2, mean.shape, running_mean.dtype)
    _loop("move_averages", dtype)(
        *addresses, *given, *made, prod(mean.shape), float(momentum), float(factor)
    )
    return new_mean, new_var


def _parameters(
    of: Any, shape: tuple[int, ...], *arrays: Array | None
) -> tuple[str, list[int], tuple[Array | None, ...]] | None:
    """Their dtype, their addresses, 0 for None, and what must be kept as long as these are used.

    None if the loops cannot take them.
    """
    dtype = None
    as_they_are = True
    addresses = []
    for a in arrays:
        if a is None:
            addresses.append(0)
            continue
        address = of.address(a)
        if not address or a.shape != shape:
            return None
        dtype = a.dtype if dtype is None else dtype
        as_they_are = as_they_are and a.dtype == dtype and of.is_dense(a)
        addresses.append(address)
    name = _name(of.float64 if dtype is None else dtype)
    if as_they_are and name in ("float32", "float64"):
        return name, addresses, arrays
    kept = tuple(None if a is None else of.wide(a) for a in arrays)
    return "float64", [0 if a is None else of.address(a) for a in kept], kept


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _loop(name: str, dtype: str) -> Any:
    return _loops.compiled(_step_loops.LOOPS[name], dtype)
