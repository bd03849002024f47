"""Pairs of modules whose inputs are computed back from their outputs instead of kept.

A block of two modules, F and G, and two streams of activations,

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

is undone from its outputs (Gomez et al. 2017), so a chain of blocks keeps the two streams at its
end, whatever its depth, and the backward pass computes the rest again, half a block at a time.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from multibn._typing import check_choice
from multibn.torch_backend.reversible.coupling import Half, Run, tensors

Mode: TypeAlias = Literal["reversible", "stored"]
Block: TypeAlias = tuple[nn.Module, nn.Module]


def reversible(
    blocks: Sequence[Block],
    x1: Tensor,
    x2: Tensor,
    *cond: Any,
    mode: Mode = "reversible",
    drop_path: Sequence[float] | None = None,
    tied_drop_path: bool = False,
    buffer_after: Collection[int] = (),
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `y1 = x1 + F(x2, *cond); y2 = x2 + G(y1, *cond)` for each `(F, G)` of `blocks`.

    Parameters
    ----------
    blocks
        Any modules: F returns the shape of the first stream, G that of the second. They may
        occur several times. What they need gradients for must be their parameters or in `cond`.
    x1, x2
        The streams, floating-point, batch first.
    *cond
        Further arguments of every module. Tensors get gradients; anything else is passed as it is.
    mode
        `"reversible"` keeps the outputs alone and runs each module again in the backward pass.
        `"stored"` keeps what autograd keeps: the same outputs bit for bit, and gradients equal but
        for rounding.
    drop_path
        For each block, the probability in [0, 1) that a sample skips F, and G, while that is in
        training (stochastic depth, Huang et al. 2016). What is kept is divided by its probability.
    tied_drop_path
        Whether a sample that skips F skips G of that block, too, as in SlowFast; else they are
        drawn apart.
    buffer_after
        Indices of blocks after which the streams are kept, so that the error of computing them back
        starts from zero there.
    stream_dtype
        Type in which the streams are added up. None is the type that the modules see them in, the
        wider of the inputs', and float64 under autocast, where modules see at least float32. A
        wider one makes what is computed back round to the very numbers that the modules saw:
        float32 for a model in half precision, float64 where float32 drifts.

    Returns
    -------
    y1, y2
        The streams behind the last block, of the shapes of `x1` and `x2`, in the type that the
        modules see.

    Raises
    ------
    TypeError
        If `x1` and `x2` are not floating-point tensors.
    ValueError
        If an option does not fit, or a module returns another shape than its stream's.
    RuntimeError
        In the forward pass, if a module changes its inputs, or buffers other than a batch norm's.
        In the backward pass, if parameters have been modified since, if a module needs gradients
        for tensors that are not its own, or with `create_graph=True`: use `mode="stored"`.

    Notes
    -----
    Collective where the modules are: every rank runs every module, samples that are dropped
    included, in the same order. Batch norms of multibn communicate in the forward pass and in the
    backward pass as in `"stored"`, and not when a module runs again (see `multibn.recompute`);
    those and torch's count each batch once.

    Random numbers are drawn from the global generators in the order of `"stored"`, and the
    recomputation puts their states back. Autocast and training flags are those of the forward pass.
    """
    check_choice("mode", mode, Mode)
    buffered = _buffered(blocks, buffer_after)
    streams, seen = _streams(x1, x2, stream_dtype)
    # What autograd will not differentiate, it does not keep.
    run = Run(cond) if mode == "reversible" and torch.is_grad_enabled() else None
    for half in _halves(blocks, streams, seen, drop_path, tied_drop_path):
        here, there = streams[half.into], streams[1 - half.into]
        if run is None:
            streams[half.into] = here + half(here, there, cond)
            continue
        streams[half.into] = run.couple(half, here, there, cond)
        if half.into == 1 and half.block in buffered:
            streams = run.anchor(streams, cond)
    return streams[0].to(seen), streams[1].to(seen)


@torch.no_grad()
def inverse(
    blocks: Sequence[Block],
    y1: Tensor,
    y2: Tensor,
    *cond: Any,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Inputs of `reversible` from its outputs, for modules in evaluation mode; no gradient.

    Raises
    ------
    RuntimeError
        If a module is in training: what it drew, and the statistics of its batch, are gone.
    """
    streams, seen = _streams(y1, y2, stream_dtype)
    for half in reversed(list(_halves(blocks, streams, seen))):
        if half.module.training:
            raise RuntimeError(
                f"{half} is in training, and what was random or of the batch in the forward pass "
                "cannot be undone after it. Call eval() first."
            )
        here, there = streams[half.into], streams[1 - half.into]
        streams[half.into] = here - half(here, there, cond)
    return streams[0].to(seen), streams[1].to(seen)


class Drift(NamedTuple):
    """How far the streams before a block, computed back from the end, are from what they were.

    Attributes
    ----------
    block
        Index of the block.
    max_abs
        Largest absolute difference.
    relative
        The same, divided by the largest absolute value of the streams there.
    """

    block: int
    max_abs: float
    relative: float


@torch.no_grad()
def drift(
    blocks: Sequence[Block],
    x1: Tensor,
    x2: Tensor,
    *cond: Any,
    drop_path: Sequence[float] | None = None,
    tied_drop_path: bool = False,
    buffer_after: Collection[int] = (),
    stream_dtype: torch.dtype | None = None,
) -> list[Drift]:
    """Measure the rounding error that the backward pass of `reversible` would meet at each block.

    A forward pass like any other, in training included: batch norms count the batch, and it is
    collective where they are. It keeps the streams before each block.

    Parameters
    ----------
    blocks, x1, x2, *cond, drop_path, tied_drop_path, buffer_after, stream_dtype
        As for `reversible`.

    Returns
    -------
    list of Drift
        One for each block, in their order.
    """
    buffered = _buffered(blocks, buffer_after)
    run = Run(cond)
    streams, seen = _streams(x1, x2, stream_dtype)
    stations = [list(streams)]
    for half in _halves(blocks, streams, seen, drop_path, tied_drop_path):
        streams[half.into] = run.first_pass(half, streams[half.into], streams[1 - half.into], cond)
        if half.into == 1:
            stations.append(list(streams))
    drifts = []
    for block in reversed(range(len(blocks))):
        if block in buffered:
            run.restore(2 * (block + 1), [*stations[block + 1], *tensors(cond)])
        run.rewind(2 * block)
        true = stations[block]
        error = max(float((a - b).abs().max()) for a, b in zip(run.streams, true, strict=True))
        size = max(float(t.abs().max()) for t in true)
        drifts.append(Drift(block, error, error / size if size else 0.0))
    return drifts[::-1]


def _buffered(blocks: Sequence[Block], buffer_after: Collection[int]) -> set[int]:
    """Indices of blocks after which streams are kept: those asked for, and the last."""
    wrong = [index for index in buffer_after if not 0 <= index < len(blocks)]
    if wrong:
        raise ValueError(
            f"`buffer_after` must be indices of the {len(blocks)} blocks: got {wrong}."
        )
    return {*buffer_after, len(blocks) - 1}


def _streams(
    x1: Tensor, x2: Tensor, stream_dtype: torch.dtype | None
) -> tuple[list[Tensor], torch.dtype]:
    """The streams in the type in which they are added up, and the type that modules see."""
    for name, x in (("first", x1), ("second", x2)):
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            got = x.dtype if isinstance(x, Tensor) else type(x).__qualname__
            raise TypeError(f"the {name} stream must be a floating-point tensor: got {got}.")
    seen = torch.promote_types(x1.dtype, x2.dtype)
    kind = x1.device.type  # "meta" has no autocast, and no answer to whether it is on
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        seen = torch.promote_types(seen, torch.float32)
        # A last bit of float32 that is computed back otherwise may flip a rounding to bfloat16, and
        # of many blocks some do. MPS has no float64.
        stream_dtype = stream_dtype or (seen if kind == "mps" else torch.float64)
    return [x.to(stream_dtype or seen) for x in (x1, x2)], seen


def _halves(
    blocks: Sequence[Block],
    streams: Sequence[Tensor],
    seen: torch.dtype,
    drop_path: Sequence[float] | None = None,
    tied: bool = False,
) -> Iterator[Half]:
    """F and G of each block, with what they drop: drawn when they are reached."""
    rates = [0.0] * len(blocks) if drop_path is None else list(drop_path)
    if len(rates) != len(blocks) or not all(0 <= rate < 1 for rate in rates):
        raise ValueError(
            f"`drop_path` must be a probability in [0, 1) for each of {len(blocks)} blocks: "
            f"got {rates}."
        )
    for index, (block, rate) in enumerate(zip(blocks, rates, strict=True)):
        scale = None
        for into, module in enumerate(block):
            if not (tied and into == 1):
                scale = _scale(streams[into], rate if module.training else 0.0)
            yield Half(index, into, module, seen, scale)


def _scale(stream: Tensor, rate: float) -> Tensor | None:
    """For each sample, 0 with probability `rate`, else 1 / (1 - rate); None is 1."""
    if not rate:
        return None
    return stream.new_empty(len(stream)).bernoulli_(1 - rate).div_(1 - rate)
