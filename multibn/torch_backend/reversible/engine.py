"""Pairs of modules whose inputs are recomputed from their outputs instead of stored.

A block has two modules, F and G, and two streams of activations; its outputs determine its inputs
(Gomez et al. 2017)::

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

So a chain of blocks of any depth stores only the two streams at its end, and the backward pass
recomputes the other streams, half a block at a time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from multibn._typing import check_choice, check_int, check_number
from multibn.torch_backend.reversible.half import Half

Mode: TypeAlias = Literal["auto", "reversible", "stored"]
Block: TypeAlias = tuple[nn.Module, nn.Module]


def reversible(
    blocks: Sequence[Block],
    x1: Tensor,
    x2: Tensor,
    *cond: Any,
    mode: Mode = "auto",
    drop_path: Sequence[float] | None = None,
    tied_drop_path: bool = False,
    buffer_after: Collection[int] = (),
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `y1 = x1 + F(x2, *cond); y2 = x2 + G(y1, *cond)` for each `(F, G)` of `blocks`.

    Parameters
    ----------
    blocks
        Any modules: F returns the shape of the first stream, G the shape of the second. A module
        may occur several times. Tensors that need gradients must be its parameters or in `cond`.
    x1, x2
        The streams, floating-point, batch first.
    *cond
        Further arguments of every module. Tensors get gradients; anything else is passed as it is.
    mode
        `"reversible"` stores the outputs alone and runs each module again in the backward pass.
        `"stored"` is ordinary autograd: outputs equal bit for bit, gradients up to rounding.
        `"auto"` is `"reversible"` while one of the modules is in training, and `"stored"` in
        evaluation. Without gradients, in torch.jit.trace and in torch.export all modes are
        `"stored"`.
    drop_path
        For each block, the probability p in [0, 1) that a sample skips F, and G, while the module
        is in training (stochastic depth, Huang et al. 2016). Other samples are divided by 1 - p.
    tied_drop_path
        Whether a sample that skips F skips G of the same block, too, as in SlowFast; otherwise two
        independent draws decide.
    buffer_after
        Indices of blocks after which the streams are stored, too: the rounding error of the
        recomputation starts from zero there.
    stream_dtype
        Dtype in which the streams are summed. By default the dtype of the modules' inputs, the
        wider of `x1` and `x2`; float64 under autocast, where modules get at least float32. With a
        wider dtype, recomputed streams round to exactly the inputs of the first pass: float32 for a
        model in half precision, float64 where float32 drifts.

    Returns
    -------
    y1, y2
        The streams after the last block, of the shapes of `x1` and `x2`, in the dtype of the
        modules' inputs.

    Raises
    ------
    TypeError
        If `x1` and `x2` are not floating-point tensors, or an option is of another type.
    ValueError
        If an option is not valid, or a module returns another shape than its stream's.
    RuntimeError
        In the forward pass, if a module changes its inputs, or buffers other than a batch norm's.
        In the backward pass, if parameters have been modified since the forward pass, if a module
        needs gradients for other tensors than its parameters and `cond`, or with
        `create_graph=True`: use `mode="stored"`.

    Notes
    -----
    Collective if the modules are: every rank runs every module in the same order, also if it drops
    all samples. Batch norms of multibn communicate as in `"stored"`, and not when a module runs
    again (see `multibn.engine.recompute`); they and torch's batch norms count each batch once.

    Random numbers come from the global generators in the order of `"stored"`, and the recomputation
    restores the generators' states. It uses the forward pass's autocast and training flags.

    torch.compile puts blocks of `"stored"` into its graph, and breaks the graph for blocks of
    `"reversible"`: there, `fullgraph=True` is an error.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch_backend.reversible import reversible
    >>> f, g = nn.Linear(8, 8), nn.Tanh()
    >>> x1, x2 = torch.randn(2, 2, 8)
    >>> y1, y2 = reversible([(f, g)], x1, x2)
    >>> torch.equal(y1, x1 + f(x2)) and torch.equal(y2, x2 + g(y1))
    True
    """
    check_choice("mode", mode, Mode)
    rates, buffered = check_options(len(blocks), drop_path, buffer_after, stream_dtype)
    streams, seen = _streams(x1, x2, stream_dtype)
    halves = _halves(blocks, streams, seen, rates, tied_drop_path)
    if _recomputes(mode, blocks):
        # Here, because its import takes seconds.
        from multibn.torch_backend.reversible.coupling import run_recomputed

        run_recomputed(halves, streams, cond, buffered)
    else:
        for half in halves:
            here, there = streams[half.into], streams[1 - half.into]
            streams[half.into] = here + half(here, there, cond)
    return streams[0].to(seen), streams[1].to(seen)


def _recomputes(mode: Mode, blocks: Sequence[Block]) -> bool:
    if mode == "stored" or not torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        return False  # torch.export
    return mode == "reversible" or any(module.training for block in blocks for module in block)


@torch.no_grad()
def inverse(
    blocks: Sequence[Block],
    y1: Tensor,
    y2: Tensor,
    *cond: Any,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Inputs of `reversible` from its outputs, for modules in evaluation mode; no gradient.

    Beside the true inputs, these show the rounding error of the recomputation: see `buffer_after`.

    Parameters
    ----------
    blocks, *cond, stream_dtype
        As in `reversible`.
    y1, y2
        Its outputs.

    Raises
    ------
    RuntimeError
        If a module is in training: its random numbers and its batch's statistics are not known.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch_backend.reversible import inverse, reversible
    >>> blocks = [(nn.Linear(8, 8).eval(), nn.Linear(8, 8).eval())]
    >>> x1, x2 = torch.randn(2, 8), torch.randn(2, 8)
    >>> u1, u2 = inverse(blocks, *reversible(blocks, x1, x2))
    >>> torch.allclose(u1, x1, atol=1e-5) and torch.allclose(u2, x2, atol=1e-5)
    True
    """
    streams, seen = _streams(y1, y2, stream_dtype)
    for half in reversed(list(_halves(blocks, streams, seen, [0.0] * len(blocks)))):
        if half.module.training:
            raise RuntimeError(
                f"{half} is in training: the random numbers and batch statistics of the forward "
                "pass are not known. Call eval() first."
            )
        here, there = streams[half.into], streams[1 - half.into]
        streams[half.into] = here - half(here, there, cond)
    return streams[0].to(seen), streams[1].to(seen)


class ReversibleSequence(nn.Module):
    """Blocks `y1 = x1 + F(x2); y2 = x2 + G(y1)` whose memory does not grow with their number.

    In training, autograd saves the outputs of the last block only; the backward pass recomputes
    each block's inputs and runs F and G again (Gomez et al. 2017, Mangalam et al. 2022). The rest
    of the program sees an ordinary chain: DistributedDataParallel, hooks, frozen and shared
    parameters, random numbers and autocast work as usual, and batch norms count each batch once.

    Parameters
    ----------
    blocks
        Pairs `(F, G)` of modules, called `layers.{i}.F` and `layers.{i}.G` in the state dict.
    mode
        `"stored"` for the same numbers from ordinary autograd, `"reversible"`, or `"auto"`, which
        is `"reversible"` in training and `"stored"` in evaluation. May be changed.
    drop_path
        Probability in [0, 1) that a sample skips F, and G, in training; one for all blocks, or one
        for each.
    tied_drop_path, buffer_after, stream_dtype
        As for `multibn.torch_backend.reversible.reversible`, which lists the errors, too.

    Raises
    ------
    TypeError, ValueError
        If an option is not valid.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch_backend.reversible import ReversibleSequence
    >>> model = ReversibleSequence([(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
    >>> y1, y2 = model(torch.randn(2, 8), torch.randn(2, 8))
    >>> (y1 + y2).sum().backward()  # stores the outputs alone
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        mode: Mode = "auto",
        drop_path: float | Sequence[float] = 0.0,
        tied_drop_path: bool = False,
        buffer_after: Sequence[int] = (),
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, Mode)
        self.layers = nn.ModuleList(nn.ModuleDict({"F": f, "G": g}) for f, g in blocks)
        count = len(self.layers)
        self.mode: Mode = mode
        self.drop_path = list(drop_path) if isinstance(drop_path, Sequence) else [drop_path] * count
        check_options(count, self.drop_path, buffer_after, stream_dtype)
        self.tied_drop_path = tied_drop_path
        self.buffer_after = tuple(buffer_after)
        self.stream_dtype = stream_dtype

    def forward(self, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """The streams after the last block; every F and G gets `cond`."""
        return reversible(
            self._blocks(),
            x1,
            x2,
            *cond,
            mode=self.mode,
            drop_path=self.drop_path,
            tied_drop_path=self.tied_drop_path,
            buffer_after=self.buffer_after,
            stream_dtype=self.stream_dtype,
        )

    def inverse(self, y1: Tensor, y2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Inputs of `forward` from its outputs, as `reversible.inverse` computes and raises."""
        return inverse(self._blocks(), y1, y2, *cond, stream_dtype=self.stream_dtype)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, drop_path={self.drop_path}, buffer_after={self.buffer_after}"

    def _blocks(self) -> list[Block]:
        return [(layer["F"], layer["G"]) for layer in self.layers]  # type: ignore[index]


def check_options(
    count: int,
    drop_path: Sequence[float] | None,
    buffer_after: Collection[int],
    stream_dtype: torch.dtype | None,
) -> tuple[list[float], set[int]]:
    """Rates of `count` blocks, and indices of blocks after which streams are stored.

    Raises TypeError or ValueError if an option of `reversible` is not valid.
    """
    rates = [0.0] * count if drop_path is None else list(drop_path)
    for rate in rates:
        check_number("drop_path", rate, "[0, 1)")
    if len(rates) != count:
        raise ValueError(
            f"`drop_path` must have a probability for each of the {count} blocks: got {rates}."
        )
    for index in buffer_after:
        check_int("buffer_after", index, 0)
        if index >= count:
            raise ValueError(
                f"`buffer_after` must be indices of the {count} blocks: got {index} among them."
            )
    if stream_dtype is not None and not (
        isinstance(stream_dtype, torch.dtype) and stream_dtype.is_floating_point
    ):
        raise TypeError(
            f"`stream_dtype` must be a floating-point dtype, or None: got {stream_dtype!r}."
        )
    return rates, {*buffer_after, count - 1}


def _streams(
    x1: Tensor, x2: Tensor, stream_dtype: torch.dtype | None
) -> tuple[list[Tensor], torch.dtype]:
    """The streams in the dtype of their sums, and the dtype of the modules' inputs."""
    for name, x in (("first", x1), ("second", x2)):
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            got = x.dtype if isinstance(x, Tensor) else type(x).__qualname__
            raise TypeError(f"the {name} stream must be a floating-point tensor: got {got}.")
    seen = torch.promote_types(x1.dtype, x2.dtype)
    kind = x1.device.type  # is_autocast_enabled raises for "meta"
    if kind != "meta" and torch.is_autocast_enabled(kind):
        seen = torch.promote_types(seen, torch.float32)
        # A float32 stream may be recomputed with another last bit, which can flip a rounding to
        # bfloat16: in a chain of many blocks, some flip. MPS has no float64.
        stream_dtype = stream_dtype or (seen if kind == "mps" else torch.float64)
    return [x.to(stream_dtype or seen) for x in (x1, x2)], seen


def _halves(
    blocks: Sequence[Block],
    streams: Sequence[Tensor],
    seen: torch.dtype,
    rates: Sequence[float],
    tied: bool = False,
) -> Iterator[Half]:
    """F and G of each block; each draws its dropped samples when the iteration reaches it."""
    for index, (block, rate) in enumerate(zip(blocks, rates, strict=True)):
        scale = None
        for into, module in enumerate(block):
            if not (tied and into == 1):
                scale = drop_scale(streams[into], rate if module.training else 0.0)
            yield Half(index, into, module, seen, scale)


def drop_scale(stream: Tensor, rate: float) -> Tensor | None:
    """For each sample, 0 with probability `rate`, else 1 / (1 - rate); None for all 1."""
    if not rate:
        return None
    return stream.new_empty(len(stream)).bernoulli_(1 - rate).div_(1 - rate)
