"""The steps between the passes for host memory, compiled by numba: one call each.

A step is dozens of operations on C numbers: one by one, they would take longer than the passes over
a small activation. Arrays without an address, and other dtypes, go to `generic`.
"""

from functools import cache
from math import prod
from typing import Any

from multibn._typing import Array
from multibn.kernels import _loops, _step_loops, generic
from multibn.kernels._memory import library_of, parameters_of, payload
from multibn.kernels._step_loops import NOT_FINITE, REFUSED
from multibn.kernels.generic import Unpacked


def pack(
    mean: Array, meansqr: Array, weight: float, count: float, /, *, out: Array | None = None
) -> Array:
    """As `generic.pack`."""
    library = library_of(mean)
    addresses = library.dense_addresses((mean, meansqr), library.float64)
    if addresses is None:
        return generic.pack(mean, meansqr, weight, count, out=out)
    C = prod(mean.shape)
    packed, address = payload(library, C, out)
    step("pack")(*addresses, address, C, weight, count)
    return packed


def unpack(summed: Array, /, *share: Any, like: Array | None = None) -> Unpacked:
    """As `generic.unpack`."""
    shape, weight, count = share
    source = library_of(summed)
    addresses = source.dense_addresses((summed,), source.float64)
    if addresses is None:
        return generic.unpack(summed, *share, like=like)
    library = source if like is None else library_of(like)
    (mean, var), results = library.new(2, shape, library.float64)
    (total_count, element_weight), scalars = library.new(2, (), library.float64)
    state = step("unpack")(*addresses, *results, *scalars, prod(shape), weight, count)
    return Unpacked(mean, var, total_count, element_weight, state == REFUSED, state != NOT_FINITE)


def move_averages(*arguments: Any) -> tuple[Array, Array]:
    """As `generic.move_averages`."""
    running_mean, running_var, mean, var, momentum, factor = arguments
    library = library_of(mean)
    addresses = library.dense_addresses((mean, var), library.float64)
    running = parameters_of(library, mean.shape, (running_mean, running_var))
    if addresses is None or running is None or running.are_copies:
        return generic.move_averages(*arguments)
    (new_mean, new_var), results = library.new(2, mean.shape, running_mean.dtype)
    step("move_averages", running.dtype)(
        *running.addresses, *addresses, *results, prod(mean.shape), float(momentum), float(factor)
    )
    return new_mean, new_var


@cache
def step(name: str, dtype: str = "float64") -> Any:
    """The compiled loop of a step for parameters of `dtype`."""
    return _loops.compiled(_step_loops.LOOPS[name], dtype)
