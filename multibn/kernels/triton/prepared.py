"""The launches of a layer's step, prepared once: one C call runs those on each side of a message.

Each call of a verb of `cuda` repeats the same checks: whether the kernels fit, how work is divided,
what Triton has compiled. That takes most of a step's time on the host. A `PreparedStep` collects
the launches of a first step, and runs them again with the addresses of later steps. Whatever may
differ between the steps of one plan is a slot, or makes the verbs run the step.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multibn.kernels.layout import channels
from multibn.kernels.spec import Gradient, NormArgs, PackedStatistics
from multibn.kernels.triton.launch import (
    Launched,
    collecting,
    current_device,
    current_stream,
    hooks,
    number,
)

try:
    from multibn.kernels.core._core import run_launches
except ImportError:  # the verbs then run all steps
    run_launches = None  # type: ignore[assignment]

# The kernels' parameters whose values differ between steps, in the order of their slots.
_FORWARD = (
    "x", "residual", "y", "partials", "coefficients", "numbers", "statistics", "weight", "bias",
    "running_mean", "running_var", "num_batches", "momentum",
)  # fmt: skip
_BACKWARD = (
    "dy", "x", "y", "dx", "dresidual", "partials", "coefficients", "numbers", "statistics",
    "weight", "bias", "dweight", "dbias",
)  # fmt: skip


# The layout of `Launch` in core/_launches.h.
_MOST_PARAMETERS = 40
_LAUNCH = f"PP4I{_MOST_PARAMETERS}q{_MOST_PARAMETERS}q"


class _Pass(NamedTuple):
    """The prepared launches of one pass, and the sizes of the memory that they share."""

    before: Any  # the launches before the message
    after: Any
    facts: Any  # see `_forward_facts`
    partials: int  # numbers
    channels: int
    dtype: torch.dtype  # of partial sums and coefficients
    shape: tuple[int, ...]  # of a per-channel tensor
    payload: int  # numbers in a message without a head


class PreparedStep:
    """The step of one plan, for an input without a mask; with `coefficients`, see the verbs.

    `forward` and `backward` run a pass and its message by the prepared launches. If none fit, they
    call `run`, which runs the pass by the verbs, and prepare the verbs' launches for later steps.
    """

    def __init__(self, *, coefficients: bool = False) -> None:
        self._coefficients = coefficients
        self._forward: _Pass | None = None
        self._backward: _Pass | None = None

    def forward(self, args: NormArgs, messages: Any, run: Callable[[], Any]) -> Any:
        """Return the output and the statistics."""
        prepared, facts = self._forward, _forward_facts(args)
        if prepared is None or prepared.facts != facts:
            shape = channels(args.x.shape, args.axis)
            result, found = _run_and_prepare(run, _FORWARD, facts, shape)
            self._forward = found or prepared
            return result
        before, after, _, num_partials, C, dtype, shape, payload = prepared
        x, weight, bias = args.x, args.weight, args.bias
        residual, running = args.residual, args.running
        new, message = x.new_empty, messages.new(x)
        numbers = new(payload, dtype=torch.float64) if message is None else message.numbers
        scratch, found = new(5 * C + num_partials, dtype=dtype), new(2 * C + 2, dtype=torch.float64)
        # Memory of its own: a view of `scratch` would keep the partial sums alive.
        y = new((5, *shape), dtype=dtype) if self._coefficients else torch.empty_like(x)
        coefficients = scratch.data_ptr()
        values: tuple[int | None, ...] = (
            x.data_ptr(), None if residual is None else residual.data_ptr(), y.data_ptr(),
            coefficients + 5 * C * dtype.itemsize,
            y.data_ptr() if self._coefficients else coefficients, numbers.data_ptr(),
            found.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )  # fmt: skip
        if running is None:
            values += None, None, None, None
        else:
            moved, counter = running[:2], running.num_batches
            values += tuple(v.data_ptr() for v in moved)
            values += None if counter is None else counter.data_ptr(), number(running.momentum)
            _increment_version(moved if counter is None else (*moved, counter))
        stream = current_stream(x.get_device())
        run_launches(before, stream, numbers.shape[0], *values)
        summed = messages.allreduce(numbers if message is None else message)
        run_launches(after, stream, summed.data_ptr(), *values)
        return y[:3] if self._coefficients else y, PackedStatistics(found, shape)

    def backward(self, g: Gradient, messages: Any, run: Callable[[], Any]) -> Any:
        """Return the gradients of input, residual, weight and bias."""
        prepared, batch, args, y = self._backward, g.batch, g.input, g.y
        x, dy, weight, bias = args.x, g.dy, args.weight, args.bias
        if dy.stride() != x.stride():
            dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
            g = g._replace(dy=dy)
        facts = _backward_facts(g)
        if prepared is None or prepared.facts != facts:
            result, found = _run_and_prepare(run, _BACKWARD, facts, batch.shape)
            self._backward = found or prepared
            return result
        before, after, _, num_partials, C, dtype, shape, payload = prepared
        new = x.new_empty
        dx = new((5, *shape), dtype=dtype) if self._coefficients else torch.empty_like(x)
        dresidual = None if y is None else torch.empty_like(x)
        dweight = None if weight is None else torch.empty_like(weight)
        dbias = None if bias is None else torch.empty_like(bias)
        message = messages.new(x)
        numbers = new(payload, dtype=torch.float64) if message is None else message.numbers
        scratch = new(5 * C + num_partials, dtype=dtype)
        coefficients = scratch.data_ptr()
        values = (
            dy.data_ptr(), x.data_ptr(), None if y is None else y.data_ptr(), dx.data_ptr(),
            None if dresidual is None else dresidual.data_ptr(),
            coefficients + 5 * C * dtype.itemsize,
            dx.data_ptr() if self._coefficients else coefficients, numbers.data_ptr(),
            batch.numbers.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if dweight is None else dweight.data_ptr(),
            None if dbias is None else dbias.data_ptr(),
        )  # fmt: skip
        stream = current_stream(x.get_device())
        run_launches(before, stream, numbers.shape[0], *values)
        summed = messages.allreduce(numbers if message is None else message)
        run_launches(after, stream, summed.data_ptr(), *values)
        return dx[:4] if self._coefficients else dx, dresidual, dweight, dbias


def _forward_facts(args: NormArgs) -> Any:
    """Return what a replay depends on beyond the plan's key; None if `args` is not supported."""
    x, residual, running = args.x, args.residual, args.running
    addresses: int = x.data_ptr()
    moved: tuple[Any, ...] = ()
    if residual is not None:
        if residual.stride() != x.stride():
            return None
        addresses |= residual.data_ptr()
    if running is not None:
        mean, var, momentum, convention, counter = running
        if momentum is None or not (mean.is_contiguous() and var.is_contiguous()):
            return None
        is_fixed = mean.is_inference() or var.is_inference()
        moved = convention, is_fixed, counter is None or (counter.dtype, counter.is_inference())
    return moved if _is_usual(addresses, args) else None


def _backward_facts(g: Gradient) -> Any:
    """Return the facts of a backward pass, as `_forward_facts` does."""
    dy, y, args = g.dy, g.y, g.input
    x, strides = args.x, args.x.stride()
    if dy.stride() != strides or (y is not None and y.stride() != strides):
        return None
    addresses = x.data_ptr() | dy.data_ptr() | (0 if y is None else y.data_ptr())
    kinds = type(dy), dy.dtype, None if y is None else y.dtype
    return kinds if _is_usual(addresses, args) else None


def _is_usual(addresses: int, args: NormArgs) -> bool:
    """Return whether launches can be repeated; `addresses` is the bitwise or of all addresses."""
    weight, bias = args.weight, args.bias
    return (
        addresses % 16 == 0
        and args.x.get_device() == current_device()
        and not hooks.calls
        and (weight is None or weight.is_contiguous())
        and (bias is None or bias.is_contiguous())
    )


def _run_and_prepare(
    run: Callable[[], Any], names: Sequence[str], facts: Any, shape: tuple[int, ...]
) -> tuple[Any, _Pass | None]:
    """Return the result of `run`, and its prepared launches if later passes can repeat them."""
    with collecting() as launched:
        result = run()
    kernels = [each.kernel.__name__ for each in launched]
    before = next((k for k, name in enumerate(kernels, 1) if name.startswith("merge_")), 0)
    # Otherwise `reference` has run a part of the pass.
    is_complete = 0 < before < len(launched)
    if facts is None or not is_complete:
        return result, None
    merge = launched[before - 1].named()
    partials: Tensor = merge["partials"]
    slots = {name: k for k, name in enumerate(names, 1)}
    # Slot 0 is the length of the message before the allreduce, and the sum after it.
    prepared = (
        prepare(launched[:before], slots | {"length": 0}),
        prepare(launched[before:], slots | {"summed": 0, "checked": 0}),
    )
    if None in prepared:
        return result, None
    C, length = merge["C"], merge["length"]
    return result, _Pass(*prepared, facts, partials.numel(), C, partials.dtype, shape, length)


def prepare(launched: Sequence[Launched], slots: dict[str, int]) -> Any:
    """Pack launches for the C core; return None if it cannot run them, or is missing."""
    packed = b""
    if run_launches is None:
        return None
    for each in launched:
        if each.compiled is None or each.compiled.metadata.target.backend != "cuda":
            return None
        metadata, given = each.compiled.metadata, []
        for name, v in each.named().items():
            if name not in slots and isinstance(v, Tensor):
                return None
            if v is not None:  # Triton leaves these out
                given.append((slots.get(name, -1), 0 if name in slots else v))
        # Triton's hidden parameters come last: addresses of memory that these kernels do not use.
        for hidden in ("global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, hidden, None):
                return None
            if hasattr(metadata, hidden):
                given.append((-1, 0))
        threads = 32 * metadata.num_warps
        packed += pack(each.compiled.function, each.programs, threads, metadata.shared, given)
    return packed


def pack(
    function: int, programs: int, threads: int, shared: int, parameters: Sequence[tuple[int, int]]
) -> bytes:
    """Pack a launch as `_launches.h` has it; each parameter is a slot, or -1, and a number."""
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    slots, numbers = zip(
        *parameters, *[(-1, 0)] * (_MOST_PARAMETERS - len(parameters)), strict=True
    )
    sizes = programs, threads, shared, len(parameters)
    return struct.pack(_LAUNCH, launch, function, *sizes, *slots, *numbers)


_increment_version = torch._C._increment_version
