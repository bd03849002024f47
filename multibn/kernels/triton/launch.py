"""The steps between the passes for torch tensors on a GPU, as Triton kernels: one launch each.

A step is dozens of operations on C numbers: one launch each would take longer than the passes over
a small activation. The kernels take dense tensors of one shape on one device: wide ones, and
parameters and running statistics of any floating-point dtype. Everything else goes to `generic`.
Nothing waits for the GPU, and a CUDA graph can capture the steps as it can the passes of `cuda`.
"""

import struct
import warnings
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from multibn import message
from multibn.kernels import generic
from multibn.kernels.arguments import Running, asks_more, other_fields
from multibn.kernels.triton import steps
from multibn.message import Message

_BLOCK = 256  # channels of a program
# Without fused operations products and sums are rounded one by one, as in `generic`.
_STEP: dict[str, Any] = {"BLOCK": _BLOCK, "enable_fp_fusion": False}
# Of programs that merge; they read so many splits of so many channels at a time.
_FEW_SPLITS = _STEP | {"BLOCK": 32, "SPLITS": 8, "num_warps": 1}
_MANY_SPLITS = _STEP | {"BLOCK": 8, "SPLITS": 128, "num_warps": 4}
_WIDE = (torch.float64,)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COUNTING = (torch.int64,)
_OTHERS = other_fields(Running, "mean", "var", "momentum", "convention", "num_batches")
_PLAIN = (Tensor, torch.nn.Parameter)


def merge_moments(partials: Tensor, out: Message | None, weight: Any, count: Any, /) -> Any:
    """The forward message, or its payload where there is no `out`; of `passes.moments`."""
    numbers, *around = _message(out, partials, message.forward_payload)
    masked = isinstance(count, Tensor)
    share = (weight, count) if masked else (bits(weight), bits(count))
    _merge(steps.merge_moments, (partials, numbers, *share, *around), ("merge_moments", masked))
    return numbers if out is None else out


def merge_sums(
    partials: Tensor, out: Message | None, statistics: tuple[Any, ...], eps: float
) -> tuple[Any, Tensor | None, Tensor | None, Tensor]:
    """What `generic.begin_backward` returns, and the coefficients of the passes.

    `partials` are of `passes.backward_sums`; `statistics` are mean, variance, weight and bias.
    """
    _, _, weight, bias = statistics
    numbers, *around = _message(out, partials, message.backward_payload)
    coefficients = partials.new_empty((5, partials.shape[-1]))
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    arguments = partials, *statistics, coefficients, numbers, dweight, dbias, *around, bits(eps)
    key = "merge_sums", weight is None or weight.dtype, bias is None or bias.dtype
    _merge(steps.merge_sums, arguments, key)
    return numbers if out is None else out, dweight, dbias, coefficients


def finish_forward(
    summed: Tensor, shape: Any, eps: float, dtype: Any, running: Any, /, *parameters_and_share: Any
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Mean, variance, count and element weight; the coefficients of the passes.

    Moves running statistics, which must be `movable`, or None.
    """
    weight, bias, rank_weight, count = parameters_and_share
    C, new = prod(shape), summed.new_empty
    statistics = new(shape), new(shape), new(()), new(())
    coefficients = new((5, C), dtype=dtype)
    masked = isinstance(count, Tensor)
    share = (rank_weight, count) if masked else (bits(rank_weight), bits(count))
    arrays, how, programs, constants, key = _moved(running, count, C)
    numbers = *share, bits(eps), *how, C
    arguments = summed, *statistics, weight, bias, coefficients, *arrays, *numbers
    key = weight is None or weight.dtype, bias is None or bias.dtype, dtype, masked, *key
    launch(steps.finish_forward, programs, arguments, constants, ("forward", *key), _known)
    return statistics, coefficients


def coefficients_of(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: Any
) -> Tensor:
    """The coefficients of the passes."""
    C = mean.numel()
    coefficients = mean.new_empty((5, C), dtype=dtype)
    arguments = mean, var, weight, bias, coefficients, bits(eps), C
    key = "coefficients_of", weight is None or weight.dtype, bias is None or bias.dtype, dtype
    launch(steps.coefficients_of, -(-C // _BLOCK), arguments, _STEP, key, _known)
    return coefficients


def move(running: Running, mean: Tensor, var: Tensor, count: Tensor, local_count: Any, /) -> None:
    """As `generic.move`; one launch."""
    mean, var = mean.view(running.mean.shape), var.view(running.mean.shape)
    if (
        not fit(mean.device, mean.shape, (mean, var))
        or not movable(running, mean, mean.numel(), local_count)
        or not isinstance(number(count, mean), Tensor)
    ):
        generic.move(running, mean, var, count, local_count)
        return
    C = mean.numel()
    arrays, how, programs, constants, key = _moved(running, local_count, C)
    arguments = *arrays, mean, var, count, *how, C
    launch(steps.move, programs, arguments, constants, ("move", *key), _known)


def movable(running: Running, like: Tensor, C: int, local_count: Any) -> bool:
    """Whether the kernels can move these running statistics by those of C channels."""
    mean, var, counter = running.mean, running.var, running.num_batches
    return (
        not (_OTHERS and asks_more(running, _OTHERS))
        and mean.numel() == C
        and fit(like.device, mean.shape, parameters=(mean, var))
        and (counter is None or fit(like.device, (), counters=(counter,)))
        and not (running.convention == "unbiased_local" and isinstance(local_count, Tensor))
        # Not in a loop: this is asked in each step.
        and not (mean.is_inference() or var.is_inference())
        and (counter is None or not counter.is_inference())
    )


def _moved(
    running: Running | None, local_count: Any, C: int
) -> tuple[tuple[Any, ...], tuple[int, int], int, dict[str, Any], tuple[Any, ...]]:
    """Arrays and numbers of `steps`, how many programs, constants, part of a key."""
    programs, constants = -(-C // _BLOCK), _NOT_MOVED
    if running is None:
        return (None, None, None), (0, 0), programs, constants, (None,)
    mean, var, counter = running.mean, running.var, running.num_batches
    _increment_version((mean, var) if counter is None else (mean, var, counter))
    momentum, convention = running.momentum, running.convention
    is_global = convention == "unbiased_global"  # the kernel then computes the factor
    factor = 0.0 if is_global else generic.variance_factor(0.0, local_count, convention)
    cumulative = momentum is None and counter is not None
    block = _BLOCK
    if cumulative:  # one program reads and writes the counter
        programs, block = 1, max(triton.next_power_of_2(C), _BLOCK)
    if cumulative or is_global:
        constants = _STEP | {"CUMULATIVE": cumulative, "UNBIASED": is_global, "BLOCK": block}
    key = mean.dtype, var.dtype, counter is None, cumulative, is_global, block
    return (mean, var, counter), (bits(momentum or 0.0), bits(factor)), programs, constants, key


def _message(
    out: Message | None, like: Tensor, payload: Callable[[int], int]
) -> tuple[Tensor, int, int, int]:
    """The numbers of the message `out`, or a new payload; the payload's place in them, their
    length and the fingerprint.
    """
    if out is None:
        length = payload(like.shape[-1])
        return like.new_empty(length, dtype=torch.float64), 0, length, bits(0.0)
    numbers, start, fingerprint = out
    return numbers, start, numbers.shape[0], bits(fingerprint)


def fit(
    device: Any, shape: tuple[int, ...], wide: Any = (), parameters: Any = (), counters: Any = ()
) -> bool:
    """Whether the kernels can take these wide tensors, and others of other dtypes or None."""
    for dtypes, arrays in ((_WIDE, wide), (_FLOATING, parameters), (_COUNTING, counters)):
        for v in arrays:
            if v is not None and (
                v.dtype not in dtypes
                or v.shape != shape
                or v.device != device
                or type(v) not in _PLAIN
                or not v.is_contiguous()
            ):
                return False
    return 0 not in shape


def number(v: float | Tensor, like: Tensor) -> int | Tensor | None:
    """`v` as a kernel's argument; None if the kernel would have to wait for another device."""
    if not isinstance(v, Tensor):
        return bits(v)
    fits = type(v) is Tensor and v.ndim == 0 and v.dtype == torch.float64
    return v if fits and v.device == like.device else None


@lru_cache(maxsize=1024)
def bits(v: float) -> int:
    """The bits of `v` in float64: Triton would pass `v` itself in float32.

    Those of -0.0 for 0: Triton would pass a small whole number in 32 bits.
    """
    return _INT64.unpack(_FLOAT64.pack(v or -0.0))[0]


_NOT_MOVED = _STEP | {"CUMULATIVE": False, "UNBIASED": False}
_INT64, _FLOAT64 = struct.Struct("=q"), struct.Struct("=d")


def _merge(kernel: Any, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> None:
    partials = arguments[0]
    _, splits, C = partials.shape
    constants = _FEW_SPLITS if splits <= 32 else _MANY_SPLITS
    key = *key, partials.dtype, splits <= 32
    programs = -(-C // constants["BLOCK"])
    launch(kernel, programs, (*arguments, splits, C), constants, key, _known)


def require_launcher() -> None:
    """Raise ImportError, with a warning, where Triton cannot compile its launcher."""
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of Triton, or of the compiler's process
        warnings.warn(
            f"Triton cannot launch kernels here: {error} Layers compute on the GPU by torch's "
            "operations, which takes longer. Install a C compiler and Python's headers, on Debian "
            "gcc and python3-dev.",
            RuntimeWarning,
            stacklevel=2,
        )
        raise ImportError("Triton cannot launch kernels") from error


def launch(
    kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], key: Any, known: Any
) -> None:
    """Launch a kernel on the device of its first argument; `num_warps` and so on are constants.

    Triton takes 14 us to look at the arguments of a launch. So `known` keeps what was compiled for
    a `key`, which the caller makes of all that can change: dtypes, and which arguments are None. No
    number is specialized in these kernels. If arguments that are specialized begin anywhere in
    memory, the key is None, and Triton looks.
    """
    device = arguments[0].get_device()
    if device != -1 and device != _current_device():  # -1: host memory, in Triton's interpreter
        with torch.cuda.device_of(arguments[0]):
            launch(kernel, programs, arguments, constants, key, known)
        return
    found = known.get((device, key))
    if found is not None and not _knobs.launch_enter_hook.calls:
        _, run, stream_of, function, metadata, values = found
        stream = stream_of(device)
        # Neither metadata of the launch nor hooks, which profilers set.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *values)
        return
    compiled = kernel[programs,](*arguments, **constants)
    if compiled is not None and key is not None:  # Triton's interpreter compiles nothing
        values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        stream_of = triton.runtime.driver.active.get_current_stream
        launcher = compiled.run, stream_of, compiled.function, compiled.packed_metadata
        known[device, key] = compiled, *launcher, values


_known: dict[Any, Any] = {}  # of all steps
_knobs = knobs.runtime
_increment_version = torch._C._increment_version  # autograd then notices that tensors have changed
_current_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: -1)
