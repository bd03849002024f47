"""Masks and lengths (which elements are used), and the weight of each rank.

The engine's masks have the shape of the activation, with channel axes of size 1.
"""

from collections.abc import Callable
from typing import Any

from array_api_compat import is_array_api_obj, is_torch_array, to_device

from multibn._arrays import array_namespace, device, is_abstract, is_on_host
from multibn._typing import Array, Weighting, check_choice
from multibn.kernels import NormArgs, steps
from multibn.kernels.layout import sizes


def as_mask(x: Array, mask: Any, lengths: Any, /, *, axis: tuple[int, ...]) -> Array | None:
    """Return the engine's mask for `x`, whose axes `axis` are reduced; None if all are used.

    Raises TypeError or ValueError, naming the argument. The values of `lengths` are checked only
    if they are in host memory: a check would have to wait for a GPU.
    """
    if mask is None and lengths is None:
        return None
    if mask is not None and lengths is not None:
        raise ValueError("`mask` and `lengths` cannot be passed together: got both.")
    name, value = ("mask", mask) if lengths is None else ("lengths", lengths)
    xp = array_namespace(x)
    if not is_array_api_obj(value) or array_namespace(value) is not xp:
        library = xp.__name__.removeprefix("array_api_compat.")
        raise TypeError(
            f"`{name}` must be an array of {library}, as the input is: got {type(value).__name__}. "
            f"Convert it: {library}.asarray({name})."
        )
    elements = tuple(x.shape[i] for i in axis)
    if lengths is not None:
        mask = _mask_of(lengths, elements, x)
    if not xp.isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"`mask` must have dtype bool (True = use the element): got {mask.dtype}. "
            "Convert it: `mask > 0`, or `mask == 0` for an additive mask (0 and -inf)."
        )
    if device(mask) != device(x):
        raise ValueError(
            f"`mask` must be on the device of the input, {device(x)}: got {device(mask)}."
        )
    try:
        mask = xp.broadcast_to(mask, elements)
    except (RuntimeError, ValueError) as error:  # torch raises RuntimeError, all others ValueError
        raise ValueError(
            f"`mask` must have the shape of the input without the channels, {elements}, or one "
            f"that broadcasts to it: got {tuple(mask.shape)} for an input of shape "
            f"{tuple(x.shape)}.{_cure(tuple(mask.shape), tuple(x.shape))}"
        ) from error
    mask = xp.reshape(mask, tuple(n if i in axis else 1 for i, n in enumerate(x.shape)))
    # Make the mask dense, in the memory order of `x`, so that no pass needs a copy.
    strides = x.stride() if is_torch_array(x) else getattr(x, "strides", (0,) * x.ndim)
    order = sorted(range(x.ndim), key=lambda i: -strides[i])
    rows = xp.permute_dims(mask, order)
    dense = xp.reshape(xp.reshape(rows, (-1,)), rows.shape)
    return xp.permute_dims(dense, sorted(range(x.ndim), key=order.__getitem__))


#: The weight of a rank, from its elements per channel and its number of samples: numbers, or
#: float64 arrays of shape `()` if a mask is on a GPU. A weighting is an entry here and a word of
#: `_typing.Weighting`. An entry must read nothing else, because a plan keeps the result.
#: `rank_weight` returns 0 for a rank without elements.
WEIGHTINGS: dict[str, Callable[[Any, Any], Any]] = {
    "element": lambda count, samples: count,
    "sample": lambda count, samples: samples,
    "rank": lambda count, samples: 1.0,
}


# Weight of a rank whose elements are all masked, in host memory: negligible compared with any other
# weight, but distinguishes the rank from one with an empty batch.
_MASKED_OUT = 2.0**-1000


def weigh(args: NormArgs, weighting: Weighting, /) -> tuple[float | Array, float | Array]:
    """Return this rank's weight and its elements per channel, excluding masked elements.

    Both are numbers, or arrays if the mask is on a GPU. A fully masked sample does not count.
    """
    samples: Any = args.x.shape[args.axis[0]]
    _, count, *_ = sizes(args.x.shape, args.axis)
    if args.mask is None:
        return rank_weight(count, samples, weighting), count
    xp = array_namespace(args.mask)
    counted = xp.count_nonzero(args.mask)
    if weighting != "element":  # the only weighting known not to read the samples, and the default
        others = tuple(k for k in range(args.mask.ndim) if k != args.axis[0])
        samples = xp.count_nonzero(xp.any(args.mask, axis=others))
    is_readable = is_on_host(args.mask) and not is_abstract(args.mask)
    numbers: Any = float if is_readable else steps.as_wide
    counted, samples = (numbers(n) if hasattr(n, "dtype") else n for n in (counted, samples))
    weight = rank_weight(counted, samples, weighting)
    return _MASKED_OUT if count and isinstance(weight, float) and not weight else weight, counted


def rank_weight(count: Any, num_samples: Any, weighting: Weighting, /) -> Any:
    """Return the weight of a rank with `count` elements per channel; 0 if it has none."""
    check_choice("weighting", weighting, Weighting)
    weight = WEIGHTINGS[weighting](count, num_samples)
    if hasattr(count, "dtype"):
        return steps.as_wide(count > 0) * weight
    return weight if count else 0.0


def _cure(mask: tuple[int, ...], x: tuple[int, ...]) -> str:
    """Return a hint for a mask whose shape does not fit the input's, or ""."""
    cures = {
        x[:1]: f"For a per-sample mask, add the other axes: mask[:{', None' * (len(x) - 2)}].",
        x[:-1]: "The input looks channels-last: transpose it to (N, C, ...), and the output back.",
        (x[0], *x[2:], 1): "Leave the axis of the channels out: mask[..., 0].",
    }
    cures |= {
        (x[0], n, *x[2:]): "Leave the axis of the channels out: mask[:, 0]." for n in (1, x[1])
    }
    return f" {cures[mask]}" if mask in cures else ""


def _mask_of(lengths: Array, elements: tuple[int, ...], x: Array) -> Array:
    """Return the mask of samples of these lengths that are padded at their ends."""
    xp = array_namespace(x)
    if len(elements) < 2:
        shape = tuple(x.shape)
        raise ValueError(
            f"`lengths` needs an input of shape (N, C, L) or (N, C, L, ...): got shape {shape}."
        )
    if not xp.isdtype(lengths.dtype, "integral"):
        raise TypeError(
            f"`lengths` must be integers: got dtype {lengths.dtype}. For relative lengths, "
            "pass round(L * lengths) as integers."
        )
    N, L, *others = elements
    if tuple(lengths.shape) != (N,):
        raise ValueError(
            f"`lengths` must have shape ({N},), one number per sample: got {tuple(lengths.shape)}."
        )
    lengths = xp.astype(lengths, xp.int64, copy=False)  # torch compares no uint16, uint32 or uint64
    if is_on_host(lengths) and not is_abstract(lengths):
        wrong = xp.nonzero((lengths < 0) | (lengths > L))[0]
        if wrong.shape[0]:
            n = int(wrong[0])
            cure = (
                "If an earlier layer shortened the input (stride, pooling), shorten `lengths` as "
                "well."
            )
            if int(xp.max(lengths)) <= x.shape[1]:
                cure = (
                    "The input looks like (N, L, C): transpose it to (N, C, L), and transpose the "
                    "output back."
                )
            raise ValueError(
                f"`lengths` must be from 0 to {L}, the length of an input (N, C, L, ...) of shape "
                f"{tuple(x.shape)}: got {int(lengths[n])} for sample {n}. {cure}"
            )
    mask = xp.arange(L, device=device(x)) < to_device(lengths, device(x))[:, None]
    return xp.reshape(mask, (N, L) + (1,) * len(others))
