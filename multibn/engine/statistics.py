"""The engine: moments of a batch, merged over the ranks that share it, and their gradients.

All functions here are pure, and take arrays of any library of the array API standard. Per-channel
arrays are float64 and have shape `(C,)`, or more generally the shape of the axes that are not
reduced (`axis` names the reduced ones; an activation is `(N, C, *spatial)` by default). Variances
are biased (divided by the count) unless a name says otherwise; counts are elements per channel,
N*H*W..., not batches.

With rank weights a_i, element counts n_i and e_i = a_i / (n_i * sum a), sums over the ranks of the
communicator::

    mean = sum(a_i * mean_i) / sum(a_i)     meansqr likewise     var = max(meansqr - mean**2, 0)
    xhat = (x - mean) * invstd              invstd = 1 / sqrt(var + eps)
    dx = weight * invstd * (dy - e_i * (sum_dy + xhat * sum_dy_xhat))

This is batch normalization (Ioffe & Szegedy, 2015, arXiv:1502.03167) of the concatenated batch when
a_i = n_i. Each pass needs one allreduce, whatever the number of ranks: 2C+2 numbers forward and 2C
backward. Layers send a head of 2 more numbers (see `multibn.wire`). Nothing here waits for a GPU,
unless a rank holds at most one value per channel.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from multibn import kernels, wire
from multibn._arrays import array_namespace, to_host, values
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator, nonfinite
from multibn.communicators.channel import resolved
from multibn.communicators.communicator import Handle
from multibn.engine import masks
from multibn.kernels import BatchStatistics as BatchStatistics
from multibn.kernels import NormArgs, steps
from multibn.kernels.layout import channels
from multibn.kernels.spec import NOT_FINITE


class Moments(NamedTuple):
    """Moments of one sub-batch, one rank, or one batch of a loader.

    Attributes
    ----------
    mean, meansqr
        Mean and mean of squares per channel, shape `(C,)`, float64.
    count
        Elements per channel, N*H*W...
    num_samples
        N; read only by `weighting="sample"`.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.engine import Moments
    >>> moments = Moments(np.asarray([2.0]), np.asarray([5.0]), count=8.0, num_samples=4.0)
    >>> print(moments.meansqr - moments.mean**2)  # the biased variance
    [1.]
    """

    mean: Array
    meansqr: Array
    count: float  # type: ignore[assignment]  # hides tuple.count, which is not needed
    num_samples: float


class OneValueError(ValueError):
    """All ranks together hold one value per channel: the output would not depend on the input."""


def reduced_axes(ndim: int, channel_axes: Sequence[int] = (1,)) -> tuple[int, ...]:
    """Return all axes of an `ndim`-dimensional activation but the channel axes."""
    return tuple(sorted(set(range(ndim)).difference(channel_axes)))


def local_moments(
    x: Array, /, *, axis: tuple[int, ...] | None = None, mask: Array | None = None
) -> Moments:
    """Return the moments of an activation over `axis` (default: all axes but 1).

    An empty batch has moments of zero. 16-bit input is computed in float32. Raises TypeError unless
    `x` is real and floating-point. `mask` is a boolean array of the shape of `x` with channel
    axes of size 1: elements where it is False are left out. `count` is an array if the mask is on a
    GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.engine import local_moments
    >>> moments = local_moments(np.asarray([[1.0, 2.0], [3.0, 4.0]]))
    >>> print(moments.mean, moments.meansqr, moments.count)
    [2. 3.] [ 5. 10.] 2.0
    """
    xp = array_namespace(x)
    if not xp.isdtype(x.dtype, "real floating"):
        raise not_floating(x)
    axis = reduced_axes(x.ndim) if axis is None else axis
    is_known = isinstance(axis, tuple) and all(hasattr(k, "__index__") for k in axis)
    if not (is_known and 0 < len(axis) == len({*axis}.intersection(range(x.ndim)))):
        raise ValueError(
            "`axis` must be a tuple of axes of the input, counted from 0, each once: got "
            f"{axis} for an input of shape {tuple(x.shape)}."
        )
    expected = tuple(n if k in axis else 1 for k, n in enumerate(x.shape))
    form, kind = (getattr(mask, name, None) for name in ("shape", "dtype"))
    if mask is not None and (form != expected or kind != xp.bool):
        raise ValueError(f"`mask` must have shape {expected} and dtype bool: got {form}, {kind}.")
    args = NormArgs(x, None, None, 0.0, axis, mask=mask)
    _, count = masks.weigh(args, "element")
    payload = kernels.select(x).begin_forward(args, 1.0, count)
    mean, meansqr = steps.split_sums(payload, channels(x.shape, axis))
    return Moments(mean, meansqr, count, float(x.shape[axis[0]]))


def aggregate(
    moments: Moments, communicator: Communicator, /, *, weighting: Weighting = "element"
) -> BatchStatistics:
    """Return the statistics of the batch that the ranks of `communicator` hold together.

    Collective: every rank must call it, even with an empty batch. One allreduce of 2C+2 float64
    numbers.

    Parameters
    ----------
    moments
        This rank's moments.
    communicator
        The ranks that share statistics.
    weighting
        `"element"` weights a rank by its elements per channel: exactly the statistics of the
        concatenated batch. `"sample"` weights it by its batch size (detectron2's mode "N").
        `"rank"` gives all ranks that are not empty the same weight (ChainerMN). The three agree if
        all ranks hold equal shapes.

    Raises
    ------
    ValueError
        If `weighting` is unknown.
    RuntimeError
        On every rank, if another rank rejected its input (host arrays only).
    FloatingPointError
        On every rank, if the moments of a rank are not finite (host arrays only).

    Examples
    --------
    >>> import numpy as np
    >>> from multibn import SingleProcess
    >>> from multibn.engine import aggregate, local_moments
    >>> batch = aggregate(local_moments(np.asarray([[1.0], [3.0], [5.0]])), SingleProcess())
    >>> print(batch.mean, batch.count)
    [3.] 3.0
    """
    mean, meansqr, count, num_samples = moments
    weight = masks.rank_weight(count, num_samples, weighting)
    if not isinstance(communicator, Handle):
        communicator = resolved(communicator)
    mark = wire.rank_bit(communicator.rank)
    payload = steps.pack(mean, meansqr, weight, count, mark)
    return allreduce_statistics(payload, mean.shape, weight, count, communicator)


def allreduce_statistics(
    payload: Array, shape: tuple[int, ...], weight: Array, count: Array, communicator: Communicator
) -> BatchStatistics:
    """Return the statistics of all ranks' payloads, see `multibn.wire`. Collective."""
    summed, xp = communicator.allreduce(payload), array_namespace(payload)
    sample = xp.reshape(payload[: math.prod(shape)], (1, *shape))  # an input of these channels
    args = NormArgs(sample, None, None, 1.0, (0,))
    batch, state = steps.statistics_of(args, summed, weight, count)
    if state == NOT_FINITE:
        raise_for(state, communicator, summed, summed)
    return batch


def raise_for(state: int, communicator: Communicator, summed: Array, x: Array) -> None:
    """Raise the error for the state of a sum of payloads. `x` is this rank's input.

    Returns only if the batch is not finite and the layer is to skip it.
    """
    if state == NOT_FINITE:
        sums = to_host(values(summed))  # under vmap several, of this process only
        nonfinite.raise_if_nonfinite(communicator, x.dtype, sums.reshape(-1, sums.shape[-1]).max(0))
        return
    raise OneValueError(
        "batch statistics need more than 1 value per channel over all ranks: got 1 on "
        f"{communicator.size} rank(s) in {nonfinite.name_of(communicator)}, with an input of shape "
        f"{tuple(x.shape)} on rank {communicator.rank}. Use a larger batch, leave out the last "
        "batch (drop_last=True), or evaluate with running statistics."
    )


def not_floating(x: Array) -> TypeError:
    """Return the error for an input that is not floating-point."""
    cure = "Convert it first, to float32 for example."
    if ".q" in str(x.dtype):  # torch.quint8
        cure = "Call revert_sync_batchnorm on the model before quantizing it."
    return TypeError(f"the input must have a real floating-point dtype: got {x.dtype}. {cure}")
