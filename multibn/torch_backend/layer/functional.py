"""Synchronized batch normalization as a differentiable function of tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from multibn._typing import Nonfinite, Weighting, check_number
from multibn.communicators import Communicator, CommunicatorLike, as_communicator
from multibn.communicators.layer_communicator import LayerCommunicator, function_communicator
from multibn.engine.plan import NormArgs, Plan
from multibn.engine.running import StepAccumulator
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import Running, reference, steps
from multibn.kernels.spec import OPTIONS, unpack
from multibn.options import NormOptions
from multibn.torch_backend._torch_private import IS_EXPORTING, MAKE_FX, get_dispatch_mode
from multibn.torch_backend.layer import autograd, compiled, dtensors, validation


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    /,
    *,
    process_group: CommunicatorLike = None,
    eps: float = 1e-5,
    weighting: Weighting = "element",
    nonfinite: Nonfinite = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
) -> tuple[Tensor, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all ranks hold together.

    Collective: every rank of `process_group` must call it, a rank with an empty batch included, and
    must run the backward pass if any rank does. One allreduce each way, of 2C+4 and 2C+2 float64
    numbers; none backward if `x` needs no gradient.

    Parameters
    ----------
    x
        Shape `(N, C, *spatial)`, floating-point, any memory format. N and the spatial sizes may
        differ between ranks and may be 0. The placements of a DTensor determine which ranks share,
        see docs/guides/dtensors.md.
    weight, bias
        Shape `(C,)`, or None for 1 and 0. The gradients are sums over this rank's batch, as in
        torch.nn.SyncBatchNorm: DistributedDataParallel averages them as usual.
    process_group, eps, weighting, nonfinite
        As `SyncBatchNorm`.
    mask, lengths
        Which elements count, as in a call of `SyncBatchNorm`; None for all.
    running_mean, running_var
        Shape `(C,)`, updated in place like those of torch.nn.functional.batch_norm in training:
        `running += momentum * (batch - running)`, with the unbiased variance of the whole batch.
        Slices of a layer's buffers update only these channels. None for no update; pass both or
        neither.
    momentum
        The weight of this batch, from 0 to 1.

    Returns
    -------
    y
        Same shape, dtype and memory format as `x`; 0 where elements do not count.
    batch
        Mean, biased variance and count of the whole batch, float64, without a gradient.

    Raises
    ------
    TypeError, ValueError
        If `x` is not floating-point, or a DTensor with an unsupported placement, the shapes do not
        fit, `mask` or `lengths` is not as above, `eps` is not a positive number, `momentum` is not
        from 0 to 1, or `process_group` is no communicator. ValueError if all ranks together hold
        one value per channel, or if masks exclude every element.
    RuntimeError
        On the other ranks, if one rank's input was rejected. On all ranks, if they are in different
        layers or in different passes of one layer, or if only some of them need gradients.
    FloatingPointError
        On all ranks, if the moments of one rank are not finite (on a GPU a step later), unless
        `nonfinite` skips the batch.

    Notes
    -----
    Second derivatives (`create_graph=True`) are exact over ranks; the backward pass then repeats
    the forward pass's allreduce. `x` must need a gradient on all ranks or on none; otherwise the
    forward pass raises, because the backward pass would hang.

    torch.func, forward mode, `vectorize=True` of torch.autograd.functional and
    `is_grads_batched=True` of torch.autograd.grad work in one process. With several ranks, they
    raise NotImplementedError.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import sync_batch_norm
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> y, statistics = sync_batch_norm(x, eps=1e-12)
    >>> y.flatten(), statistics.mean.item()
    (tensor([-1.,  1.]), 2.0)

    The first channel of a layer with two, as in a slimmable network:

    >>> layer = torch.nn.BatchNorm1d(2)
    >>> running = {"running_mean": layer.running_mean[:1], "running_var": layer.running_var[:1]}
    >>> y, _ = sync_batch_norm(x, layer.weight[:1], layer.bias[:1], **running)
    >>> layer.running_mean
    tensor([0.2000, 0.0000])
    """
    eps, momentum = validation.as_number(eps), validation.as_number(momentum)
    options = NormOptions(eps=eps, weighting=weighting, nonfinite=nonfinite)
    compared = vars(options) | {"momentum": None if running_mean is None else momentum}
    running = None
    group = as_communicator(process_group)
    communicator = function_communicator("sync_batch_norm", group, compared)
    try:
        options.check()
        check_number("momentum", momentum, "[0, 1]")
        given = {"weight": weight, "bias": bias, "running_mean": running_mean}
        for name, v in (given | {"running_var": running_var}).items():
            if not (v is None or isinstance(v, Tensor)):
                kind = type(v).__qualname__
                raise TypeError(f"`{name}` must be a torch.Tensor or None: got {kind}.")
            validation.check_dense(f"`{name}`", v)
        num_channels = next((v.numel() for v in given.values() if v is not None), None)
        if running_mean is not None and running_var is not None:
            running = Running(running_mean, running_var, momentum)
        elif running_mean is not running_var:
            raise ValueError(
                "`running_mean` and `running_var` must both be tensors, or both None: got one."
            )
    except (TypeError, ValueError) as error:
        validation.raise_on_all_ranks(error, x, None, communicator)
    mask = validation.mask_of(x, mask, lengths, num_channels, communicator)
    axis = validation.non_channel_axes(x)
    args = NormArgs(x, weight, bias, eps, axis, mask=mask, running=running)
    y, batch = normalize_with_batch_stats(args, num_channels, communicator, weighting=weighting)
    return y, BatchStatistics(*(v.clone() for v in batch))  # the backward pass reads `batch`


def normalize_with_batch_stats(
    args: NormArgs, num_channels: int | None, communicator: Communicator, /, *, weighting: Weighting
) -> tuple[Tensor, BatchStatistics]:
    """Normalize an input by the batch's statistics, with one allreduce each way. Collective.

    Uses the layer's cached plan. If there is none, validates the input, including `num_channels`,
    and makes a plan. Compiled code, meta tensors and fake tensors use custom operators.
    """
    if compiled.is_compiling_or_fake(args.x):
        result = _forward_compiled(args, num_channels, communicator, weighting)
        if result is not None:
            return result
    layer = communicator if isinstance(communicator, LayerCommunicator) else None
    key = None if layer is None else autograd.plan_key(args, weighting)
    plan = None if layer is None else layer.plans.get(key)
    if plan is None:
        if dtensors.contains_dtensor((args.x, args.weight, args.bias, args.residual)):
            # Check the whole DTensor, not each rank's shard, so that all ranks raise.
            validation.check_input(args.x, num_channels)
            function = partial(normalize_with_batch_stats, weighting=weighting)
            return dtensors.normalize_local(function, args, num_channels, communicator)
        validation.validate_call(args, num_channels, communicator)
        if autograd.is_transformed() or get_dispatch_mode(MAKE_FX):
            return autograd.differentiable_forward(args, communicator, weighting)
        needed = autograd.needs_gradient(args.x)
        with torch.no_grad():  # as in the autograd node, so that any kernels can be chosen
            plan = Plan(args, communicator, weighting=weighting, needs_gradient=needed)
        if layer is not None and key is not None:
            layer.cache_plan(key, plan)
    y, batch = autograd.apply((plan, args), args.x, args.weight, args.bias, args.residual)
    return y, unpack(batch)


def _forward_compiled(
    args: NormArgs, num_channels: int | None, communicator: Any, weighting: Weighting
) -> tuple[Tensor, BatchStatistics] | None:
    """Run `normalize_with_batch_stats` by custom operators; None if unsupported (torch.func).

    Compiled code cannot detect a recomputation, in which the operators return a count of 0.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and getattr(torch.compiler, IS_EXPORTING):
        raise RuntimeError(
            "torch.export cannot export layers that share statistics in training: the program "
            "would need the processes of this run. Call model.eval() first, or export a copy of "
            "the model after revert_sync_batchnorm."
        )
    has_name = hasattr(communicator, "operator_name")
    # Custom operators cannot mix DTensors and plain tensors.
    if compiling and (dtensors.contains_dtensor((args.x, args.weight, args.bias)) or not has_name):
        torch._dynamo.graph_break(
            msg="sync_batch_norm, and any layer with DTensors, is not compiled and runs eagerly. "
            "Call torch.compile without fullgraph=True."
        )
        eager = torch.compiler.disable(normalize_with_batch_stats)
        return eager(args, num_channels, communicator, weighting=weighting)
    if (compiling and autograd.is_transformed()) or not has_name or num_channels is None:
        return None
    if not compiling:
        validation.check_input(args.x, num_channels)
        try:
            validation.check_options(args)
        except ValueError as error:  # a meta input and parameters with data, on this rank perhaps
            validation.raise_on_all_ranks(error, args.x, num_channels, communicator)
    x, mask, running = args.x, args.mask, args.running
    step_accumulator = running if isinstance(running, StepAccumulator) else None
    buffers = (None,) * 5 if running is None or step_accumulator is not None else running
    y, *numbers = torch.ops.multibn.forward(
        *(x, args.weight, args.bias, mask, args.residual, *buffers),
        *(num_channels, communicator.operator_name, weighting, *args[3 : 3 + len(OPTIONS)]),
    )
    batch = BatchStatistics(*numbers)
    if step_accumulator is not None:
        local_count = x.numel() // max(batch.mean.numel(), 1) if mask is None else mask.sum()
        step_accumulator.add(batch, local_count=local_count)
    return y, batch


def normalize_with_running_stats(args: NormArgs, mean: Any, var: Any, /) -> Tensor:
    """Normalize an input by running statistics of the channels' shape. Not collective.

    If `mean` or `var` is None, use torch's statistics of this process's batch.
    """
    if dtensors.contains_dtensor((args.x, args.weight, mean)):
        return dtensors.evaluate_local(normalize_with_running_stats, args, mean, var)
    if mean is None or var is None:
        return _evaluate_by_torch(args, None, None)  # torch would update the other one
    dtypes = {p.dtype for p in (args.weight, args.bias, mean) if p is not None}
    wide_dtype = torch.promote_types(args.x.dtype, torch.float32)
    if mean.ndim == 1 and len(dtypes) == 1 and dtypes <= {args.x.dtype, wide_dtype}:
        return _evaluate_by_torch(args, mean, var)
    # F.batch_norm rejects some combinations of dtypes that training accepts. For splits, whose
    # statistics have shape (splits, C), it would need copies of some inputs.
    validation.check_options(args)
    batch = BatchStatistics(steps.as_wide(mean), steps.as_wide(var), mean, mean)
    y: Tensor = reference.finish(args, reference.output_coefficients(args, batch))
    return y


def _evaluate_by_torch(args: NormArgs, mean: Tensor | None, var: Tensor | None) -> Tensor:
    """Evaluate by F.batch_norm. If `mean` and `var` are None, use the batch's statistics."""
    is_eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing())
    if mean is not None and var is not None and is_eager and torch.is_grad_enabled():
        mean, var = mean.clone(), var.clone()  # may be updated before the backward pass
    # Without masking, a NaN in a masked element would reach the gradients of weight and bias.
    x = reference.masked(args.x, args.mask)
    y = F.batch_norm(x, mean, var, args.weight, args.bias, mean is None, eps=args.eps)
    y = align_gradient(y)
    y = y if args.residual is None else y + args.residual
    return reference.masked(y.relu() if args.relu else y, args.mask)


def align_gradient(y: Tensor) -> Tensor:
    """Return `y`, an output of torch's batch norm; its gradient will get the strides of `y`.

    On CPU, torch 2.13 computes wrong gradients of weight and bias if the incoming gradient has a
    different memory format than the output, and an axis of size 1 has an unusual stride. An
    example: one sample of tokens, (1, H * W, C), viewed as (1, C, H, W).
    """
    is_eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing())
    if is_eager and y.requires_grad and y.is_cpu and 1 in y.shape:
        strides = y.stride()

        def aligned(g: Tensor) -> Tensor:
            return g if g.stride() == strides else g.new_empty_strided(g.shape, strides).copy_(g)

        y.register_hook(aligned)
    return y


class BatchNormMode(TorchFunctionMode):
    """A context in which calls of torch.nn.functional.batch_norm go to `batch_norm`.

    Inside of `batch_norm`, F.batch_norm is torch's function.
    """

    batch_norm: Callable[..., Any]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.batch_norm if func is F.batch_norm else func)(*args, **kwargs or {})
