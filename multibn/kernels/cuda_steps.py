"""The steps between the passes for torch tensors on a GPU, as Triton kernels: one launch each.

A step is dozens of operations on C numbers: one launch each would take longer than the passes over
a small activation. The kernels take dense tensors of one shape on one device: wide ones, and
parameters and running statistics of any floating-point dtype. Everything else goes to `generic`.
Nothing waits for the GPU, and a CUDA graph can capture the steps as it can the passes of `cuda`.
"""

import struct
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from multibn import message
from multibn.kernels import _triton_steps, generic
from multibn.kernels.generic import Running
from multibn.message import Message

_BLOCK = 256  # channels of a program
# Without fused operations products and sums are rounded one by one, as in `generic`.
_STEP: dict[str, Any] = {"BLOCK": _BLOCK, "enable_fp_fusion": False}
# Of programs that merge; they read so many splits of so many channels at a time.
_FEW_SPLITS = _STEP | {"BLOCK": 32, "SPLITS": 8, "num_warps": 1}
_MANY_SPLITS = _STEP | {"BLOCK": 8, "SPLITS": 128, "num_warps": 4}
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)


def merge_moments(partials: Tensor, out: Message | None, weight: float, count: float, /) -> Any:
    """The forward message, or its payload where there is no `out`; of `_triton.moments`."""
    _, splits, C = partials.shape
    sent, around = _around(out, partials, message.forward_payload(C))
    arguments = partials, *around, bits(weight), bits(count), splits, C
    _merge(_triton_steps.merge_moments, arguments)
    return sent


def merge_sums(
    partials: Tensor,
    out: Message | None,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """As `generic.begin_backward`, of `_triton.backward_sums`."""
    _, splits, C = partials.shape
    sent, (numbers, *around) = _around(out, partials, message.backward_payload(C))
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    arguments = partials, mean, var, numbers, dweight, dbias, *around, bits(eps), splits, C
    _merge(_triton_steps.merge_sums, arguments)
    return sent, dweight, dbias


def finish_forward(
    summed: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    rank_weight: float,
    count: float,
    eps: float,
    dtype: torch.dtype,
    running: Running | None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Mean, variance, count and element weight; the coefficients of `_triton.normalize`.

    Moves running statistics, which must be `movable`, or None.
    """
    C = prod(shape)
    new = summed.new_empty
    statistics = new(shape), new(shape), new(()), new(())
    coefficients = summed.new_empty((3, C), dtype=dtype)
    numbers = bits(rank_weight), bits(max(count, 1.0)), bits(eps)
    arrays, how, programs, constants = _moved(running, count, C)
    arguments = summed, *statistics, weight, bias, coefficients, *arrays, *numbers, *how, C
    launch(_triton_steps.finish_forward, programs, *arguments, **constants)
    if running is not None:
        _has_changed(running)
    return statistics, coefficients


def output_coefficients(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: Any
) -> Tensor:
    """The coefficients of `_triton.normalize`."""
    C = mean.numel()
    coefficients = mean.new_empty((3, C), dtype=dtype)
    arguments = mean, var, weight, bias, coefficients, bits(eps), C
    launch(_triton_steps.coefficients_of, _blocks(C), *arguments, **_STEP)
    return coefficients


def gradient_coefficients(
    summed: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    element_weight: Any,
    eps: float,
    dtype: Any,
) -> Tensor:
    """The coefficients of `_triton.input_gradient`."""
    C = mean.numel()
    coefficients = mean.new_empty((5, C), dtype=dtype)
    arguments = summed, mean, var, weight, bias, element_weight, coefficients, bits(eps), C
    launch(_triton_steps.finish_backward, _blocks(C), *arguments, **_STEP)
    return coefficients


def move(running: Running, mean: Tensor, var: Tensor, count: Tensor, local_count: Any, /) -> None:
    """As `generic.move`; one launch."""
    mean, var = mean.view(running.mean.shape), var.view(running.mean.shape)
    if (
        not fit(mean, var)
        or not movable(running, mean, mean.numel(), local_count)
        or not isinstance(number(count, mean), Tensor)
    ):
        generic.move(running, mean, var, count, local_count)
        return
    C = mean.numel()
    arrays, how, programs, constants = _moved(running, local_count, C)
    with torch.cuda.device_of(mean):
        launch(_triton_steps.move, programs, *arrays, mean, var, count, *how, C, **constants)
    _has_changed(running)


def movable(running: Running, like: Tensor, C: int, local_count: Any) -> bool:
    """Whether the kernels can move these running statistics by those of C channels."""
    mean, var, _, convention, num_batches = running
    return (
        mean.numel() == C
        and fit(like, parameters=(mean, var), shape=mean.shape)
        and not (convention == "unbiased_local" and isinstance(local_count, Tensor))
        and not (mean.is_inference() or var.is_inference())
        and (num_batches is None or _is_counter(num_batches, like))
    )


def _moved(
    running: Running | None, local_count: Any, C: int
) -> tuple[tuple[Any, ...], tuple[int, int], int, dict[str, Any]]:
    """Arrays and numbers of `_triton_steps.move`, how many programs it takes, and constants."""
    programs, constants = _blocks(C), _NOT_MOVED
    if running is None:
        return (None, None, None), (0, 0), programs, constants
    mean, var, momentum, convention, num_batches = running
    is_global = convention == "unbiased_global"  # the kernel then computes the factor
    factor = 0.0 if is_global else generic.variance_factor(0.0, local_count, convention)
    cumulative = momentum is None and num_batches is not None
    if cumulative or is_global:
        constants = _STEP | {"CUMULATIVE": cumulative, "UNBIASED": is_global}
    if cumulative:  # one program reads and writes the counter
        programs, constants = 1, constants | {"BLOCK": max(triton.next_power_of_2(C), _BLOCK)}
    return (mean, var, num_batches), (bits(momentum or 0.0), bits(factor)), programs, constants


def _has_changed(running: Running) -> None:
    """Autograd would not notice otherwise that a saved tensor has changed."""
    mean, var, _, _, num_batches = running
    moved = (mean, var) if num_batches is None else (mean, var, num_batches)
    torch.autograd.graph.increment_version(moved)


def _around(
    out: Message | None, like: Tensor, payload: int
) -> tuple[Any, tuple[Tensor, int, int, int]]:
    """A new payload, or the message `out`; its numbers, the payload's place in them, their
    length and the fingerprint.
    """
    if out is None:
        numbers = like.new_empty(payload, dtype=torch.float64)
        return numbers, (numbers, 0, payload, 0)
    return out, (out.numbers, out.start, out.numbers.shape[0], bits(out.fingerprint))


def fit(
    first: Tensor,
    *others: Tensor,
    parameters: tuple[Tensor | None, ...] = (),
    shape: tuple[int, ...] | None = None,
) -> bool:
    """Whether the kernels can take these wide tensors, and `parameters` of other dtypes."""
    for v in (first, *others):
        if (
            v.dtype != torch.float64
            or type(v) not in _PLAIN
            or v.shape != first.shape
            or v.device != first.device
            or not v.is_contiguous()
        ):
            return False
    for p in parameters:
        if p is not None and (
            p.dtype not in _FLOATING
            or type(p) not in _PLAIN
            or p.shape != (first.shape if shape is None else shape)
            or p.device != first.device
            or not p.is_contiguous()
        ):
            return False
    return first.numel() > 0


def _is_counter(v: Tensor, like: Tensor) -> bool:
    return (
        type(v) is Tensor
        and v.shape == ()
        and v.dtype == torch.int64
        and v.device == like.device
        and not v.is_inference()
    )


def number(v: float | Tensor, like: Tensor) -> int | Tensor | None:
    """`v` as a kernel's argument; None if the kernel would have to wait for another device."""
    if not isinstance(v, Tensor):
        return bits(v)
    fits = type(v) is Tensor and v.ndim == 0 and v.dtype == torch.float64
    return v if fits and v.device == like.device else None


@lru_cache(maxsize=1024)
def bits(v: float) -> int:
    """The bits of `v` in float64: Triton would pass `v` itself in float32."""
    return _INT64.unpack(_FLOAT64.pack(v))[0]


_NOT_MOVED = _STEP | {"CUMULATIVE": False, "UNBIASED": False}
_INT64, _FLOAT64 = struct.Struct("=q"), struct.Struct("=d")


def _merge(kernel: Any, arguments: tuple[Any, ...]) -> None:
    *_, splits, C = arguments
    constants = _FEW_SPLITS if splits <= 32 else _MANY_SPLITS
    launch(kernel, _blocks(C, constants["BLOCK"]), *arguments, **constants)


def _blocks(C: int, block: int = _BLOCK) -> int:
    return -(-C // block)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, whose constants are its last parameters; `num_warps` and so on are options.

    Triton takes 14 us to look at the arguments of each launch, a third of it to find that a
    compiled kernel fits them. No number is a constant of these kernels and each has one width, so
    that dtypes and alignment tell which compiled kernel fits.
    """
    key = (
        kernel.__name__,
        arguments[0].device,
        *constants.values(),
        *[
            a if a is None else a.dtype if a.data_ptr() % 16 == 0 else (a.dtype,)
            for a in arguments
            if type(a) is not int
        ],
    )
    direct = _compiled.get(key)
    if direct is not None:
        compiled, values = direct
        compiled[programs, 1, 1](*arguments, *values)
        return
    compiled = kernel[programs,](*arguments, **constants)
    # Triton's interpreter compiles nothing, and Triton before 3.3 passes no constants on.
    if compiled is not None and len(compiled.src.signature) == len(kernel.arg_names):
        values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _compiled[key] = compiled, values


_compiled: dict[Any, tuple[Any, list[Any]]] = {}
