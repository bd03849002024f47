"""Pairs of modules whose inputs are recomputed from their outputs instead of stored.

A block has two modules, F and G, and two streams of activations; its outputs determine its inputs
(Gomez et al. 2017)::

    y1 = x1 + F(x2)        x2 = y2 - G(y1)
    y2 = x2 + G(y1)        x1 = y1 - F(x2)

So a chain of blocks of any depth stores only the two streams at its end, and the backward pass
recomputes the other streams, half a block at a time.
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

    In training, autograd saves the outputs of the last block only; the backward pass recomputes
    each block's inputs and runs F and G again (Gomez et al. 2017, Mangalam et al. 2022). The rest
    of the program sees an ordinary chain: DistributedDataParallel, hooks, frozen and shared
    parameters, random numbers and autocast work as usual, and batch norms count each batch once.

    Parameters
    ----------
    blocks
        Pairs `(F, G)` of modules, called `layers.{i}.F` and `layers.{i}.G` in the state dict. F
        returns the shape of the first stream, G the shape of the second. A module may occur several
        times. Tensors that need gradients must be its parameters or arguments of the call.
    mode
        `"reversible"` stores the outputs alone and runs each module again in the backward pass.
        `"stored"` is ordinary autograd: outputs equal bit for bit, gradients up to rounding.
        `"auto"` is `"reversible"` while one of the modules is in training, and `"stored"` in
        evaluation. Without gradients, in torch.jit.trace and in torch.export all modes are
        `"stored"`. May be changed.
    drop_path
        Probability in [0, 1) that a sample skips F, and G, while the module is in training
        (stochastic depth, Huang et al. 2016); one for all blocks, or one for each. Other samples
        are divided by 1 - p.
    tied_drop_path
        Whether a sample that skips F skips G of the same block, too, as in SlowFast; otherwise two
        independent draws decide.
    stream_dtype
        Dtype in which the streams are summed. By default the dtype of the modules' inputs, the
        wider of `x1` and `x2`; float64 under autocast, where modules get at least float32. With a
        wider dtype, recomputed streams round to exactly the inputs of the first pass: float32 for a
        model in half precision, float64 where float32 drifts.

    Raises
    ------
    TypeError, ValueError
        If an option is not valid.

    Notes
    -----
    Collective if the modules are: every rank runs every module in the same order, also if it drops
    all samples. Batch norms communicate as in `"stored"`, and not when a module runs again.

    Random numbers come from the global generators in the order of `"stored"`, and the recomputation
    restores the generators' states. It uses the forward pass's autocast and training flags.

    torch.compile puts blocks of `"stored"` into its graph, and breaks the graph for blocks of
    `"reversible"`: there, `fullgraph=True` is an error.

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
        if stream_dtype is not None and not (
            isinstance(stream_dtype, torch.dtype) and stream_dtype.is_floating_point
        ):
            raise TypeError(
                f"`stream_dtype` must be a floating-point dtype, or None: got {stream_dtype!r}."
            )
        self.stream_dtype = stream_dtype

    def forward(self, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """The streams after the last block; every F and G gets `cond`.

        Streams are floating-point tensors, batch first. Tensors of `cond` get gradients; anything
        else is passed as it is. The results have the shapes of `x1` and `x2`, and the dtype of the
        modules' inputs.

        Raises TypeError unless `x1` and `x2` are floating-point tensors, or if a module returns
        anything but a floating-point tensor, and ValueError if a module returns another shape than
        its stream's. Raises RuntimeError if a module modifies in place its inputs, parameters, or
        buffers other than a batch norm's, or if FSDP shards it apart from the others; in the
        backward pass, if parameters or buffers were modified in place since the forward pass, if a
        module needs gradients for other tensors than its parameters and `cond`, or with
        `create_graph=True`: use `mode="stored"`.
        """
        return self._run(range(len(self.layers)), x1, x2, *cond)

    def inverse(self, y1: Tensor, y2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Return the streams of which `y1` and `y2` are the outputs, up to rounding.

        By ordinary autograd, in any `mode`. Call `eval()` first, except for modules that compute
        the same in training: dropout draws new numbers, and batch norms count the batch again.
        Raises RuntimeError if samples would be dropped (`drop_path` in training).
        """
        streams, input_dtype = _streams(y1, y2, self.stream_dtype)
        for branch in [*self._branches(range(len(self.layers)), streams, input_dtype)][::-1]:
            if branch.scale is not None:
                raise RuntimeError(
                    f"`inverse` needs `drop_path=0` in training: {branch} drops other samples in "
                    "each call. Call eval() first, also for the forward pass."
                )
            stream, x = streams[branch.target], streams[1 - branch.target]
            streams[branch.target] = stream - branch(stream, x, cond)
        return streams[0].to(input_dtype), streams[1].to(input_dtype)

    def _run(self, indices: range, x1: Tensor, x2: Tensor, *cond: Any) -> tuple[Tensor, Tensor]:
        """Run only some of the layers."""
        check_choice("mode", self.mode, Mode)
        streams, input_dtype = _streams(x1, x2, self.stream_dtype)
        branches = self._branches(indices, streams, input_dtype)
        if self._recomputes(indices):
            # Here, because its import takes seconds.
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
        """F and G of each block; each draws its dropped samples when the iteration reaches it."""
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
    """The streams in the dtype of their sums, and the dtype of the modules' inputs."""
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
        # A float32 stream may be recomputed with another last bit, which can flip a rounding to
        # bfloat16: in a chain of many blocks, some flip. MPS has no float64.
        stream_dtype = stream_dtype or (input_dtype if kind == "mps" else torch.float64)
    return [x.to(stream_dtype or input_dtype) for x in (x1, x2)], input_dtype


def drop_scale(stream: Tensor, rate: float) -> Tensor | None:
    """A factor for each sample: 0 with probability `rate`, else 1 / (1 - rate); None for all 1."""
    if not rate:
        return None
    return (
        stream.new_empty(len(stream), *[1] * (stream.ndim - 1)).bernoulli_(1 - rate).div_(1 - rate)
    )
