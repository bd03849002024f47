"""A layer's training step: a `Plan`, made once for each kind of input, and its two passes.

    Plan.forward                                            shapes
        verbs.begin_forward     moments of this rank's x    2C+2: weight * mean, weight * meansqr,
                                                                  weight, count
        messages.allreduce      with a head of 2 numbers    2C+4 float64 numbers, summed over ranks
        verbs.finish_forward    y, running statistics       x's shape; (C,)
    Plan.backward
        verbs.begin_backward    this rank's sums            2C: sum_dy, sum_dy_xhat
        messages.allreduce      with a head of 2 numbers    2C+2 float64 numbers, summed over ranks
        verbs.finish_backward   dx                          x's shape

The verbs are those of `multibn.kernels`; `wire` describes the messages. As in FFTW and cuDNN, a
plan is valid for one shape, dtype and set of options. All that follows from these is computed when
the plan is made; in each step, a layer only looks up the plan for its input. `engine.statistics`
has the same steps as functions of arrays, for use without layers.
"""

from functools import partial
from typing import Any, TypeAlias

import numpy as np

from multibn import kernels, wire
from multibn._arrays import is_on_host, values
from multibn._typing import Array, Weighting
from multibn.communicators import Communicator
from multibn.communicators.layer_communicator import LayerCommunicator, LayerPhase
from multibn.communicators.nonfinite import name_of
from multibn.engine import masks, recompute, statistics
from multibn.engine.running import StepAccumulator, update_running
from multibn.kernels import BatchStatistics, reference, steps
from multibn.kernels import Gradient as Gradient
from multibn.kernels import NormArgs as NormArgs
from multibn.kernels.layout import sizes
from multibn.kernels.spec import (
    CANCELLED,
    OK,
    PackedStatistics,
    options_of,
    pack_statistics,
    unpack,
)

# The gradients of x, residual, weight and bias. None if absent; for the residual's, see
# `reference.residual_gradient`.
Gradients: TypeAlias = tuple[Array | None, Array | None, Array | None, Array | None]

# The arrays of an input that a framework may differentiate, in the order of its nodes.
INPUTS = "x", "weight", "bias", "residual"


class Plan:
    """The prepared training step of one layer, for inputs like `args.x`.

    Parameters
    ----------
    args
        An example input. The plan is valid for all inputs that differ from it only in values,
        parameters and running statistics; whether there is a mask must agree, too.
    communicator
        The ranks that share statistics.
    weighting
        As in `statistics.aggregate`.
    verbs
        The kernels to use instead of those that `kernels.select` chooses.
    phase
        The name of the forward message.
    needs_gradient, finetune
        Whether `backward` may follow, and Chainer's `finetune`: each must be equal on all ranks.
    copied
        Whether a GPU's messages are in a CUDA graph's memory, to which no reference may be kept.

    The first forward and the first backward pass set up their messages. This is collective if the
    layer has not sent any message yet: one allreduce of a fixed size.
    """

    def __init__(
        self,
        args: NormArgs,
        communicator: Communicator,
        /,
        *,
        weighting: Weighting,
        verbs: Any = None,
        phase: str = "forward",
        needs_gradient: bool = True,
        finetune: bool = False,
        copied: bool = False,
    ) -> None:
        x = args.x
        self.axis, self.options = args.axis, options_of(args)
        self.given = tuple(name for name in INPUTS if getattr(args, name) is not None)
        self.channels, _, *self._lengths = sizes(x.shape, args.axis)
        self.weighting: Weighting = weighting
        self._weight, self._count = masks.weigh(args._replace(mask=None), weighting)
        self._verbs = verbs or kernels.select(x)
        self.communicator, self._phase, self._copied = communicator, phase, copied
        self.facts: Any = {"needs_gradient": needs_gradient, "finetune": finetune}
        self._forward: _Messages | None = None
        self._backward: _Messages | None = None
        self._is_usual = args.mask is None and type(args.running) is not StepAccumulator
        self._prepared: Any = None

    def prepare_launches(self) -> None:
        """Record the kernel launches of the next step on a GPU, for later steps to repeat."""
        prepare = getattr(self._verbs, "PreparedStep", None)
        if prepare is not None and self._is_usual and self._count > 1:
            self._prepared = prepare()

    def forward(self, args: NormArgs, /, *, recorded: bool = True) -> tuple[Any, PackedStatistics]:
        """Return the input normalized by the statistics of all ranks' batches together, and these.

        Collective, one allreduce of 2C+4 float64 numbers, unless `engine.recompute` replays the
        statistics. In host memory, a second allreduce follows if a variance is too small compared
        with the square of the mean. Raises as `statistics.aggregate` does, and OneValueError (a
        ValueError) on every rank if the ranks together hold one value per channel. Without
        `recorded`, runs the verbs and leaves the tapes of `engine.recompute` alone.
        """
        if recorded and (recompute.state.stack or self._prepared is not None):
            return self._forward_recorded(args)
        messages = self._forward
        if messages is None:
            of = self.communicator, self._phase, args.x, self._lengths[0], self._copied
            messages = self._forward = _Messages(*of, **self.facts)
        weight, count = self._weight, self._count
        if args.mask is not None:
            weight, count = masks.weigh(args, self.weighting)
        memory = messages.new(args.x) if messages.memory is None else messages.memory
        sent = self._verbs.begin_forward(args, weight, count, messages.mark, out=memory)
        summed = messages.allreduce(sent)
        passed = args
        if type(args.running) is StepAccumulator:
            passed = args._replace(running=None)
        y, batch, state = self._verbs.finish_forward(passed, summed, weight, count)
        if state != OK:
            return self._finish_abnormal(state, args, summed, batch, count)
        if args.mask is not None:
            self._check_mask(args, summed, unpack(batch))
        if passed is not args:
            args.running.add(unpack(batch), local_count=count)
        return y, batch

    def _forward_recorded(self, args: NormArgs) -> tuple[Any, Any]:
        """Run `forward` with the tapes of `recompute`, or by launches of an earlier step."""
        if recompute.state.stack:
            replayed = recompute.replayed(self.channels)
            if replayed is not None:
                batch = pack_statistics(replayed)
                return self._verbs.normalize(args, batch), batch
            y, batch = self.forward(args, recorded=False)
            recompute.record(unpack(batch), args, self)
            return y, batch
        run = partial(self.forward, args, recorded=False)
        return self._prepared.forward(args, self._forward, run)

    def _finish_abnormal(
        self, state: int, args: NormArgs, summed: Array, packed: PackedStatistics, count: Any
    ) -> tuple[Any, PackedStatistics]:
        """Finish a pass whose state is not OK, or raise; the state is the same on all ranks."""
        if state == CANCELLED and self._phase == "about the mean":
            return args.x, packed  # the caller needs no output; do not recentre again
        batch = unpack(packed)
        if state == CANCELLED:  # send one more message, with the moments about the mean
            centered, centre = reference.centered(args, batch.mean)
            options: Any = {"weighting": self.weighting, "verbs": self._verbs}
            plan = Plan(centered, self.communicator, phase="about the mean", **options)
            _, found_about_mean = plan.forward(centered, recorded=False)
            batch = unpack(found_about_mean)
            batch = batch._replace(mean=centre + batch.mean)
        else:
            messages: Any = self._forward
            statistics.raise_for(state, messages.communicator, summed, args.x)
            batch = steps.skipped(batch)
        update_running(args.running, batch, count)
        packed = pack_statistics(batch)
        return self._verbs.normalize(args, packed), packed

    def _check_mask(self, args: NormArgs, summed: Array, batch: BatchStatistics) -> None:
        """Raise on all ranks if masks exclude every element of a batch that is not empty."""
        if is_on_host(batch.count) and batch.count == 0 and bool((values(summed[-2]) > 0).any()):
            rank, size = self.communicator.rank, self.communicator.size
            raise ValueError(
                f"`mask` or `lengths` excludes every element of the batch on all {size} rank(s) in "
                f"{name_of(self.communicator)}, with an input of shape {tuple(args.x.shape)} on "
                f"rank {rank}. Keep at least one element on one of the ranks."
            )

    def backward(self, g: Gradient, /, *, means: bool = False, by_verbs: bool = False) -> Gradients:
        """Return the gradients of a layer's input, residual and parameters.

        Collective if `x` needs a gradient: one allreduce of 2C+2 float64 numbers. The gradients of
        parameters are this rank's. With `means`, they are the means over the ranks, and `x` must
        need a gradient. `by_verbs` skips launches that an earlier step prepared.
        """
        if self._prepared is not None and g.needs_dx and not (means or by_verbs):
            run = partial(self.backward, g, by_verbs=True)
            return self._prepared.backward(g, self._backward, run)
        messages, verbs = self._backward, self._verbs
        if not g.needs_dx:
            _, dweight, dbias, *_ = verbs.begin_backward(g)
            return None, None, dweight, dbias
        if messages is None:
            of = self.communicator, "backward", g.input.x, self._lengths[1], self._copied
            messages = self._backward = _Messages(*of)
        memory = messages.new(g.input.x) if messages.memory is None else messages.memory
        payload, dweight, dbias, *begun = verbs.begin_backward(g, out=memory)
        summed = messages.allreduce(payload)
        if means:
            dweight, dbias = verbs.parameter_gradients(summed, g, divisor=messages.size)
        return *verbs.finish_backward(g, summed, *begun), dweight, dbias


class _Messages:
    """The messages of one phase: their memory, the function that sums them, this rank's mark.

    `memory` is the channel's buffer. If it is None, `new(like)` returns memory for one message, or
    None if the verbs are to allocate it. `size` is the number of ranks.
    """

    memory: Any = None
    new: Any = staticmethod(lambda like: None)

    def __init__(
        self, communicator: Communicator, phase: str, x: Array, n: int, copied: bool, **facts: Any
    ) -> None:
        if type(communicator) is LayerCommunicator:
            communicator = communicator.for_phase(phase, x.dtype, n, like=x, **facts)
        self.communicator, self.allreduce = communicator, communicator.allreduce
        self.size, self.mark = communicator.size, wire.rank_bit(communicator.rank)
        if type(communicator) is not LayerPhase:
            return
        if copied:
            self.allreduce = partial(communicator.allreduce, copied=True)
        kind = _memory_kind(x)
        if kind == "host" and self.size > 1:
            self.memory = communicator.buffer()
        elif kind == "host":
            self.new = lambda like: np.empty(n)
        elif kind == "torch's GPU" and communicator.reduces_on_device(x):
            self.new = communicator.message


def _memory_kind(x: Array) -> str:
    """Return where an array is, as far as a communicator may have memory there."""
    if type(x) is np.ndarray or getattr(x, "is_cpu", False):
        return "host"
    return "torch's GPU" if getattr(x, "is_cuda", False) else "elsewhere"
