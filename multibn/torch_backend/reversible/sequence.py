"""Pairs of modules whose inputs are recomputed from their outputs instead of stored.

A block has two modules, F and G, and two streams of activations; its outputs determine its inputs
(Gomez et al. 2017)::

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

So a chain of blocks of any depth stores only its two outputs. The backward pass recomputes the
streams before them, one branch (F or G) at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from multibn._typing import check_bool, check_choice, check_number
from multibn.torch_backend.reversible.residual_branch import ResidualBranch, dtype_or_type_name

Mode: TypeAlias = Literal["auto", "reversible", "stored"]
Block: TypeAlias = tuple[nn.Module, nn.Module]


class ReversibleSequence(nn.Module):
    """Blocks `y1 = x1 + F(x2); y2 = x2 + G(y1)` whose activation memory does not grow with depth.

    In training, autograd saves the outputs of the last block only. The backward pass recomputes
    each block's inputs and runs F and G again (Gomez et al. 2017, Mangalam et al. 2022).
    DistributedDataParallel, hooks, frozen and shared parameters, random numbers and autocast work
    as in an ordinary nn.Sequential, and batch norms count each batch once.

    Parameters
    ----------
    blocks
        Pairs `(F, G)` of modules, called `layers.{i}.F` and `layers.{i}.G` in the state dict. F
        returns the shape of the first stream, G the shape of the second. A module may occur several
        times. Tensors that need gradients must be its parameters, or passed in `cond`.
    mode
        `"reversible"` stores only the outputs and runs each module again in the backward pass.
        `"stored"` is ordinary autograd: the outputs are equal bit for bit, the gradients up to
        rounding. `"auto"` is `"reversible"` while any F or G is in training mode, otherwise
        `"stored"`. Without gradients, and in torch.jit.trace and torch.export, all modes are
        `"stored"`. The attribute may be assigned.
    drop_path
        Probability p in [0, 1) that a sample skips F or G while that module is in training mode
        (stochastic depth, Huang et al. 2016). One number for all blocks, or one for each. The
        results of other samples are divided by 1 - p.
    tied_drop_path
        If True, a sample skips both F and G of a block or neither, as in SlowFast. Otherwise F and
        G are skipped independently.
    stream_dtype
        Dtype in which the streams are summed. Default: the dtype of the modules' inputs, which is
        the wider of `x1` and `x2`. Under autocast, the default is float64, and modules get at least
        float32. With a wider dtype, recomputed streams round to exactly the inputs of the first
        pass. Use float32 for a model in half precision, and float64 if recomputed float32 streams
        drift.

    Raises
    ------
    TypeError, ValueError
        If an option is not valid.

    Notes
    -----
    Collective if the modules are: every rank runs every module in the same order, even if all
    samples are dropped. Batch norms communicate as often as in `"stored"`: not in a recomputation.

    Random numbers come from the global generators in the order of `"stored"`. The recomputation
    repeats these numbers, with the forward pass's autocast and training flags.

    torch.compile puts `"stored"` blocks into its graph. `"reversible"` blocks break the graph, so
    that `fullgraph=True` is an error.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch.reversible import ReversibleSequence
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
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, Mode)
        check_bool(tied_drop_path=tied_drop_path)
        self.layers = nn.ModuleList(nn.ModuleDict({"F": f, "G": g}) for f, g in blocks)
        count = len(self.layers)
        self.mode: Mode = mode
        self.drop_path = list(drop_path) if isinstance(drop_path, Sequence) else [drop_path] * count
        for rate in self.drop_path:
            check_number("drop_path", rate, "[0, 1)")
        if len(self.drop_path) != count:
            raise ValueError(
                f"`drop_path` must have a probability for each of the {count} blocks: got "
                f"{self.drop_path}."
            )
        self.tied_drop_path = tied_drop_path
        is_dtype = isinstance(stream_dtype, torch.dtype)
        if stream_dtype is not None and not (is_dtype and stream_dtype.is_floating_point):
            raise TypeError(
                f"`stream_dtype` must be a floating-point dtype, or None: got {stream_dtype!r}."
            )
        self.stream_dtype = stream_dtype

    def forward(self, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Return the streams after the last block; every F and G gets `cond`.

        `x1` and `x2` are floating-point tensors, batch first. Tensors in `cond` get gradients. The
        results have the shapes of `x1` and `x2`, and the dtype of the modules' inputs.

        Raises TypeError if `x1`, `x2` or the result of a module is not a floating-point tensor, and
        ValueError if the result's shape differs from the stream's. In `"reversible"`, raises
        RuntimeError if a module modifies its inputs, parameters or buffers in place (batch norms
        may update their buffers), or if FSDP shards it separately. In the backward pass, raises
        RuntimeError if parameters or buffers were modified in place after the forward pass, if a
        tensor that needs a gradient is neither a parameter nor in `cond`, or with
        `create_graph=True`.
        """
        return self._run(range(len(self.layers)), x1, x2, *cond)

    def inverse(self, y1: Tensor, y2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Return the streams `x1` and `x2` that `forward` maps to `y1` and `y2`, up to rounding.

        Uses ordinary autograd in any `mode`. Call `eval()` before `forward` unless the modules
        compute the same in training: dropout draws new numbers, and batch norms count the batch
        again. Raises RuntimeError if samples would be dropped (`drop_path` in training).
        """
        streams, input_dtype = _streams(y1, y2, self.stream_dtype)
        for branch in [*self._branches(range(len(self.layers)), streams, input_dtype)][::-1]:
            if branch.scale is not None:
                raise RuntimeError(
                    f"`inverse` needs `drop_path=0` in training: {branch} drops different samples "
                    "in each call. Call eval() first, also for the forward pass."
                )
            stream, x = streams[branch.target], streams[1 - branch.target]
            streams[branch.target] = stream - branch(stream, x, cond)
        return streams[0].to(input_dtype), streams[1].to(input_dtype)

    def _run(self, indices: range, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Run the blocks `indices` only."""
        check_choice("mode", self.mode, Mode)
        streams, input_dtype = _streams(x1, x2, self.stream_dtype)
        branches = self._branches(indices, streams, input_dtype)
        if self._recomputes(indices):
            # This import takes seconds.
            from multibn.torch_backend.reversible.coupling import run_recomputed

            run_recomputed(branches, streams, cond)
        else:
            for branch in branches:
                stream, x = streams[branch.target], streams[1 - branch.target]
                streams[branch.target] = stream + branch(stream, x, cond)
        return streams[0].to(input_dtype), streams[1].to(input_dtype)

    def _recomputes(self, indices: range) -> bool:
        if self.mode == "stored" or not torch.is_grad_enabled():
            return False
        # Not is_exporting(), which is true in torch.compile for torch 2.10 and 2.11.
        is_exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if torch.jit.is_tracing() or is_exporting:
            return False
        modules = (getattr(self.layers[index], name) for index in indices for name in "FG")
        return self.mode == "reversible" or any(module.training for module in modules)

    def _branches(
        self, indices: range, streams: Sequence[Tensor], input_dtype: torch.dtype
    ) -> Iterator[ResidualBranch]:
        """Yield F and G of each block; the dropped samples are drawn just before each is run."""
        for index in indices:
            scale = None
            for target, name in enumerate("FG"):
                module: nn.Module = getattr(self.layers[index], name)
                if not (self.tied_drop_path and target == 1):
                    rate = self.drop_path[index] if module.training else 0.0
                    scale = drop_scale(streams[target], rate)
                yield ResidualBranch(index, target, module, input_dtype, scale)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, drop_path={self.drop_path}"


def _streams(
    x1: Tensor, x2: Tensor, stream_dtype: torch.dtype | None
) -> tuple[list[Tensor], torch.dtype]:
    """Return the streams in the dtype of their sums, and the dtype of the modules' inputs."""
    are_tensors = isinstance(x1, Tensor) and isinstance(x2, Tensor)
    input_dtype = torch.promote_types(x1.dtype, x2.dtype) if are_tensors else torch.bool
    if not input_dtype.is_floating_point:
        raise TypeError(
            "the streams must be floating-point tensors: "
            f"got {dtype_or_type_name(x1)}, {dtype_or_type_name(x2)}."
        )
    kind = x1.device.type  # is_autocast_enabled raises for "meta"
    if kind != "meta" and torch.is_autocast_enabled(kind):
        input_dtype = torch.promote_types(input_dtype, torch.float32)
        # The last bit of a recomputed float32 stream may differ, and then its rounding to bfloat16
        # can differ, too. In a chain of many blocks, that happens. MPS has no float64.
        stream_dtype = stream_dtype or (input_dtype if kind == "mps" else torch.float64)
    return [x.to(stream_dtype or input_dtype) for x in (x1, x2)], input_dtype


def drop_scale(stream: Tensor, rate: float) -> Tensor | None:
    """Return a factor per sample: 0 with probability `rate`, else 1 / (1 - rate); None if all 1."""
    if not rate:
        return None
    scale = stream.new_empty(len(stream), *[1] * (stream.ndim - 1))
    return scale.bernoulli_(1 - rate).div_(1 - rate)
