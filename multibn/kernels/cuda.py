"""The verbs for torch tensors on a GPU, as Triton kernels: a few launches each.

The kernels take activations that have sizes (N, C, S), see `layout`: contiguous and channels-last
formats of any number of dimensions. Per-channel tensors must have one shape and device: statistics
in float64, parameters and running statistics in any floating-point dtype. Everything else goes to
`reference`. Nothing waits for the GPU, and the launches depend only on shapes, strides and dtypes:
a CUDA graph can capture a pass that an earlier run outside the graph has compiled. While the graph
is replayed, Python does not check the messages between the ranks: ranks in different layers go
unnoticed, and a batch that is not finite is skipped. Results do not depend on the order in which
programs run, but on the number of multiprocessors of the GPU, among which sums are divided.
"""

from typing import Any

import torch
from torch import Tensor

from multibn.kernels import reference
from multibn.kernels.spec import OK, Gradient, NormArgs, PackedStatistics, Running
from multibn.kernels.steps import parameter_gradients as parameter_gradients
from multibn.kernels.steps import state_of, variance_factor
from multibn.kernels.triton import passes, steps
from multibn.kernels.triton.launch import launch, number, require_launcher
from multibn.kernels.triton.prepared import PreparedStep as PreparedStep
from multibn.kernels.triton.tiling import DTYPES, Tilings, tilings_of
from multibn.wire import HEAD, NO_BIT, Message, backward_payload

if torch.cuda.is_available():
    require_launcher()

FIELDS: dict[Any, tuple[str, ...]] = {
    NormArgs: ("x", "weight", "bias", "eps", "axis", "residual", "relu", "running", "mask"),
    Gradient: ("dy", "input", "batch", "y", "needs_dx"),
    Running: ("mean", "var", "momentum", "convention", "num_batches"),
}

# BLOCK: channels per program of a step. Without fused operations, each product and each sum is
# rounded, as in `reference`.
_STEP: dict[str, Any] = {"BLOCK": 256, "enable_fp_fusion": False}
# Programs that merge read SPLITS splits of BLOCK channels at a time.
_FEW_SPLITS = _STEP | {"BLOCK": 32, "SPLITS": 8, "num_warps": 1}
_MANY_SPLITS = _STEP | {"BLOCK": 8, "SPLITS": 128, "num_warps": 4}
# Numbers of a message that one program of `steps.nonfinite_flags` reads.
_SHARE = 8192
_NONFINITE_FLAGS: dict[str, Any] = {"SHARE": _SHARE, "enable_fp_fusion": False}
_PLAIN = (Tensor, torch.nn.Parameter)
_NOT_MOVED = _STEP | {"CUMULATIVE": False, "UNBIASED": False}
_known: dict[Any, Any] = {}  # compiled launches of all steps
_increment_version = torch._C._increment_version  # autograd then notices that tensors have changed


def begin_forward(
    args: NormArgs,
    rank_weight: Any,
    count: Any,
    mark: float = NO_BIT,
    /,
    *,
    out: Message | None = None,
) -> Any:
    """Implement `reference.begin_forward`; two launches."""
    x, tilings = args.x, _tilings(args)
    if tilings is None:
        return reference.begin_forward(args, rank_weight, count, mark, out=out)
    programs, sizes, splits, constants, known = tilings.sums
    partials = x.new_empty((4, splits, tilings.channels), dtype=tilings.dtype)
    key = "moments" if x.data_ptr() % 16 == 0 else None
    arguments = x, _bytes(args.mask), partials, *sizes
    launch(passes.moments, programs, arguments, constants, key, known)
    numbers, *around = _message(out, partials, tilings.payload)
    arguments = partials, numbers, number(rank_weight), number(count), number(mark), *around
    _merge(steps.merge_moments, arguments, ("merge_moments", *map(_kind, (rank_weight, count))))
    return numbers if out is None else out


def finish_forward(
    args: NormArgs, summed: Tensor, rank_weight: Any, count: Any, /, *, coefficients: bool = False
) -> tuple[Tensor, PackedStatistics, int]:
    """Implement `reference.finish_forward`; two launches, or one with `coefficients`.

    A cumulative average takes two more launches, thousands of channels one more.
    """
    tilings, weight, bias, running = _tilings(args), args.weight, args.bias, args.running
    if (
        tilings is None
        or not _fit_channels(tilings, summed, args)
        or not (running is None or can_update_running(running, tilings))
    ):
        return reference.finish_forward(args, summed, rank_weight, count, coefficients=coefficients)
    is_many = isinstance(count, float) and count > 1.0
    state = OK if summed.is_cuda and is_many else state_of(summed, count)
    moved = running if state == OK else None
    shape, C, new = tilings.shape, tilings.channels, summed.new_empty
    batch = PackedStatistics(new(2 * C + 2), shape)
    found = new((5, C), dtype=tilings.dtype)
    arrays, how, constants, key = _moved(moved, count)
    checked, length = summed, 2 * C
    if length > _SHARE:
        checked, length = new(-(-length // _SHARE)), -(-length // _SHARE)
        flags = summed, checked, 2 * C
        launch(steps.nonfinite_flags, length, flags, _NONFINITE_FLAGS, "nonfinite_flags", _known)
    numbers = number(rank_weight), number(count), number(args.eps), *how, length, C
    arguments = summed, batch.numbers, weight, bias, found, *arrays, checked, *numbers
    key = _kind(rank_weight), _kind(count), _kind(weight), _kind(bias), tilings.dtype, *key
    _step(steps.finish_forward, arguments, constants, ("forward", *key))
    if constants["CUMULATIVE"]:  # after the launch, since all its programs read the counter
        arrays[2].add_(batch.numbers[-2] > 0)
    return _output(tilings, args, found, coefficients), batch, state


def begin_backward(g: Gradient, /, *, out: Message | None = None) -> tuple[Any, ...]:
    """Implement `reference.begin_backward`: two launches, or three to recompute a ReLU's sign.

    Also returns state for `finish_backward`.
    """
    args, tilings, numbers = g.input, _tilings(g.input), g.batch.numbers
    if tilings is None or not _fit_channels(tilings, numbers, args):
        return reference.begin_backward(g, out=out)
    statistics = numbers, args.weight, args.bias
    programs, sizes, splits, constants, known = tilings.sums
    coefficients = None
    if args.relu and g.y is None:
        coefficients = coefficients_of(numbers, args, tilings.dtype)
    partials = args.x.new_empty((2, splits, tilings.channels), dtype=tilings.dtype)
    inputs, key = _inputs(g)
    arguments = *inputs, numbers, coefficients, partials, *sizes
    own_key = key and (*key, "sums", coefficients is None)
    launch(passes.backward_sums, programs, arguments, constants, own_key, known)
    payload, *around = _message(out, partials, backward_payload(tilings.channels))
    coefficients = partials.new_empty((5, tilings.channels))
    dweight = None if args.weight is None else torch.empty_like(args.weight)
    dbias = None if args.bias is None else torch.empty_like(args.bias)
    eps = number(args.eps)
    arguments = partials, *statistics, coefficients, payload, dweight, dbias, *around, eps
    _merge(steps.merge_sums, arguments, ("merge_sums", _kind(args.weight), _kind(args.bias)))
    return payload if out is None else out, dweight, dbias, (tilings, inputs, key, coefficients)


def finish_backward(
    g: Gradient, summed: Tensor, begun: Any = None, /, *, coefficients: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Implement `reference.finish_backward`; one launch. `begun` comes from `begin_backward`."""
    x, statistics = g.input.x, g.batch.numbers
    if begun is None or not fit(x.device, (statistics.numel() - 2,), (summed,)):
        return reference.finish_backward(g, summed, coefficients=coefficients)
    tilings, inputs, key, of_output = begun
    if coefficients:
        weight, found = g.input.weight, summed.new_empty((4, *tilings.shape), dtype=tilings.dtype)
        arguments = summed, statistics, weight, found, number(g.input.eps), tilings.channels
        key = "gradient", _kind(weight), tilings.dtype
        _step(steps.gradient_coefficients, arguments, _STEP, key)
        return found, None
    programs, sizes, _, constants, known = tilings.elementwise[g.input.relu]
    dx = torch.empty_like(x)
    dresidual = None if g.y is None else torch.empty_like(x)
    arguments = *inputs, of_output, dx, dresidual, summed, statistics, *sizes
    key = key and (*key, "gradient", g.y is None)
    launch(passes.input_gradient, programs, arguments, constants, key, known)
    return dx, dresidual


def normalize(args: NormArgs, batch: PackedStatistics, /, *, coefficients: bool = False) -> Tensor:
    """Implement `reference.normalize`; two launches, or one with `coefficients`.

    The output is rounded once, to the dtype of `x`.
    """
    tilings, numbers = _tilings(args), batch.numbers
    if tilings is None or not _fit_channels(tilings, numbers, args):
        return reference.normalize(args, batch, coefficients=coefficients)
    found = coefficients_of(numbers, args, tilings.dtype)
    return _output(tilings, args, found, coefficients)


def _output(tilings: Tilings, args: NormArgs, found: Tensor, coefficients: bool) -> Tensor:
    """Return the output by the result of `coefficients_of`, or the coefficients themselves."""
    if coefficients:
        return found[:3].view(3, *tilings.shape)
    x, residual = args.x, args.residual
    programs, sizes, _, constants, known = tilings.elementwise[args.relu]
    y = torch.empty_like(x)
    addresses = x.data_ptr()
    if residual is not None:
        residual = _laid_out_as(x, residual)
        addresses |= residual.data_ptr()
    key = ("normalize", residual is None) if addresses % 16 == 0 else None
    arguments = x, _bytes(args.mask), found, residual, y, *sizes
    launch(passes.normalize, programs, arguments, constants, key, known)
    return y


def coefficients_of(statistics: Tensor, args: NormArgs, dtype: Any) -> Tensor:
    """Return the coefficients of the passes, see `passes`, from packed statistics."""
    C, weight, bias = statistics.numel() // 2 - 1, args.weight, args.bias
    coefficients = statistics.new_empty((5, C), dtype=dtype)
    arguments = statistics, weight, bias, coefficients, number(args.eps), C
    key = "coefficients_of", _kind(weight), _kind(bias), dtype
    _step(steps.coefficients_of, arguments, _STEP, key)
    return coefficients


def can_update_running(running: Running, tilings: Tilings) -> bool:
    """Return whether the kernels can update these running statistics."""
    mean, var, counter = running.mean, running.var, running.num_batches
    return (
        mean.numel() == tilings.channels
        and fit(tilings.device, mean.shape, parameters=(mean, var))
        and (counter is None or fit(tilings.device, (), counters=(counter,)))
        # Not a loop, which would be slower: this runs in each step.
        and not (mean.is_inference() or var.is_inference())
        and (counter is None or not counter.is_inference())
    )


def _moved(
    running: Running | None, local_count: Any
) -> tuple[tuple[Any, ...], tuple[int, Any], dict[str, Any], tuple[Any, ...]]:
    """Return arrays, scalars, compile-time constants, and a part of a cache key, for `steps`."""
    constants = _NOT_MOVED
    if running is None:
        return (None, None, None), (0, 0), constants, (None,)
    mean, var, counter = running.mean, running.var, running.num_batches
    _increment_version((mean, var) if counter is None else (mean, var, counter))
    momentum, convention = running.momentum, running.convention
    is_global = convention == "unbiased_global"  # the kernel then computes the factor
    factor = number(0.0 if is_global else variance_factor(0.0, local_count, convention))
    cumulative = momentum is None and counter is not None
    if cumulative or is_global:
        constants = _STEP | {"CUMULATIVE": cumulative, "UNBIASED": is_global}
    key = mean.dtype, var.dtype, counter is None, cumulative, is_global, type(factor)
    return (mean, var, counter), (number(momentum or 0.0), factor), constants, key


def _message(out: Message | None, like: Tensor, length: int) -> tuple[Tensor, int, int, int]:
    """Return memory for a message, the payload's start, the length, and the fingerprint.

    The memory is that of `out`, or else a new payload of this length.
    """
    if out is None:
        return like.new_empty(length, dtype=torch.float64), 0, length, number(0.0)
    numbers, fingerprint = out
    return numbers, HEAD, numbers.shape[0], number(fingerprint)


def _merge(kernel: Any, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> None:
    partials = arguments[0]
    _, splits, C = partials.shape
    constants = _FEW_SPLITS if splits <= 32 else _MANY_SPLITS
    _step(kernel, (*arguments, splits, C), constants, (*key, partials.dtype, splits <= 32))


def _step(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], key: Any) -> None:
    """Launch one program for each block of channels; the last argument is their number."""
    programs = -(-arguments[-1] // constants["BLOCK"])
    launch(kernel, programs, arguments, constants, key, _known)


def fit(
    device: Any, shape: tuple[int, ...], wide: Any = (), parameters: Any = (), counters: Any = ()
) -> bool:
    """Return whether the kernels support these tensors: their dtypes, device, shape and strides."""
    for dtypes, arrays in (
        ((torch.float64,), wide),
        (DTYPES, parameters),
        ((torch.int64,), counters),
    ):
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


def _fit_channels(tilings: Tilings, numbers: Tensor, args: NormArgs) -> bool:
    """Return whether the kernels support a payload or packed statistics, and the parameters."""
    device, parameters = tilings.device, (args.weight, args.bias)
    return fit(device, (tilings.payload,), (numbers,)) and fit(
        device, tilings.shape, (), parameters
    )


def _kind(v: Any) -> Any:
    """Return the part of a launch's key for an argument that is a tensor, a number, or None."""
    return v.dtype if isinstance(v, Tensor) else v is None


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _inputs(g: Gradient) -> tuple[Any, Any]:
    """Return the arrays that a backward pass reads, with the strides of `x`, and a launch's key."""
    dy, x, y, mask = g.dy, g.input.x, g.y if g.input.relu else None, g.input.mask
    if dy.stride() != x.stride():
        dy = _laid_out_as(x, dy)
    addresses, dtype = x.data_ptr() | dy.data_ptr(), None
    if y is not None:
        y = _laid_out_as(x, y)
        addresses, dtype = addresses | y.data_ptr(), y.dtype
    key = (dy.dtype, dtype) if addresses % 16 == 0 else None
    return (dy, x, y, _bytes(mask)), key


def _tilings(args: NormArgs) -> Tilings | None:
    """Return the tilings of a pass; None if the kernels do not support it."""
    x = args.x
    if args.residual is not None and args.residual.dtype != x.dtype:
        return None
    return tilings_of(x.shape, x.stride(), x.dtype, args.axis, x.device, args.mask is not None)


def _laid_out_as(x: Tensor, other: Tensor) -> Tensor:
    """Return `other` in the memory order of `x`; a copy if needed (an expanded tensor)."""
    strides = zip(x.shape, x.stride(), other.stride(), strict=True)
    if all(n == 1 or a == b for n, a, b in strides):
        return other
    return torch.empty_like(x, dtype=other.dtype).copy_(other)
