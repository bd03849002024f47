"""Synchronized batch normalization as a differentiable function of tensors."""

import math
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from multibn import kernels
from multibn._typing import Nonfinite, Weighting, check_eps, check_residual
from multibn.communicators import (
    Communicator,
    CommunicatorLike,
    as_communicator,
    layer_communicator,
)
from multibn.communicators.layer_communicator import LayerCommunicator
from multibn.engine import masks, statistics
from multibn.engine.plan import NormArgs, Plan
from multibn.engine.statistics import BatchStatistics
from multibn.kernels import Running, reference, steps
from multibn.kernels.layout import channels
from multibn.kernels.spec import unpack
from multibn.options import NormOptions
from multibn.torch_backend._torch_private import (
    ACTIVE_DDP,
    MAKE_FX,
    FakeTensor,
    get_dispatch_mode,
    get_tracing_state,
)
from multibn.torch_backend.layer import autograd, data_parallel, dtensors


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
) -> tuple[Tensor, BatchStatistics]:
    """Normalize `x` by the statistics of the batch that all ranks hold together.

    Collective: every rank of `process_group` must call it, a rank with an empty batch included, and
    must run the backward pass if any rank does. One allreduce each way, of 2C+4 and 2C+2 float64
    numbers; none backward if `x` needs no gradient.

    Parameters
    ----------
    x
        Shape `(N, C, *spatial)`, floating-point, any memory format. N and the spatial sizes may
        differ between ranks and may be 0. The placements of a DTensor say which ranks share, see
        docs/guides/dtensors.md.
    weight, bias
        Shape `(C,)`, or None for 1 and 0. Their gradients are this rank's sums, as with
        torch.nn.SyncBatchNorm: DistributedDataParallel averages them like any other gradient.
    process_group, eps, weighting, nonfinite
        As `SyncBatchNorm`.
    mask, lengths
        Which elements count, as in a call of `SyncBatchNorm`; None for all.

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
        fit, `mask` or `lengths` is not as above, `eps` is not a positive number, or `process_group`
        is no communicator. ValueError if all ranks hold one value per channel together, or if a
        mask leaves none.
    RuntimeError
        On the other ranks, if one rank's input was refused. On all ranks, if they are in different
        layers, or in different phases of one layer, or if a backward pass may follow on some only.
    FloatingPointError
        On all ranks, if the moments of one rank are not finite (on a GPU a step later), unless
        such a batch is skipped, see `nonfinite`.

    Notes
    -----
    Second derivatives (`create_graph=True`) are exact over ranks; the backward pass then repeats
    the forward pass's allreduce. `x` must need a gradient on all ranks or on none, which the
    forward message compares: in the backward pass, ranks that need one wait for all others.

    torch.func, forward mode, `vectorize=True` of torch.autograd.functional and
    `is_grads_batched=True` of torch.autograd.grad work in one process; NotImplementedError if
    several ranks share.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import sync_batch_norm
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> y, statistics = sync_batch_norm(x, eps=1e-12)
    >>> y.flatten(), statistics.mean.item()
    (tensor([-1.,  1.]), 2.0)
    """
    options = NormOptions(eps=eps, weighting=weighting, nonfinite=nonfinite)
    compared: dict[str, object] = {"nonfinite": nonfinite}
    group = as_communicator(process_group)
    communicator = LayerCommunicator(group, lambda: "sync_batch_norm", options=lambda: compared)
    try:
        options.check()
        num_channels = _channels_of(weight, bias)
    except (TypeError, ValueError) as error:
        refuse(error, x, None, communicator)
    compared |= vars(options)
    mask = mask_of(x, mask, lengths, num_channels, communicator)
    args = NormArgs(x, weight, bias, eps, all_but_channels(x), mask=mask)
    y, batch = forward(args, num_channels, communicator, weighting=weighting)
    return y, BatchStatistics(*(v.clone() for v in batch))  # the backward pass reads the others


def _channels_of(weight: Any, bias: Any) -> int | None:
    """The channels of the parameters; None if there are no parameters."""
    shapes = []
    for name, p in (("weight", weight), ("bias", bias)):
        if p is None:
            continue
        if not isinstance(p, Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor or None: got {type(p).__qualname__}.")
        check_dense(f"`{name}`", p)
        shapes.append(tuple(p.shape))
    if len(set(shapes)) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ValueError(f"`weight` and `bias` must have the same shape (C,): got {shapes}.")
    return shapes[0][0] if shapes else None


def mask_of(
    x: Any, mask: Any, lengths: Any, num_channels: int | None, communicator: Communicator
) -> Tensor | None:
    """The engine's mask for `x`, see `masks.checked`. Collective if it raises, see `refuse`."""
    if mask is None and lengths is None:
        return None
    try:
        check_input(x, None)
        for name, v in (("`mask`", mask), ("`lengths`", lengths)):
            check_plain(name, v)
            check_dense(name, v)
        return masks.checked(x, mask, lengths, axis=all_but_channels(x))
    except (TypeError, ValueError) as error:
        refuse(error, x, num_channels, communicator)


def forward(
    args: NormArgs,
    num_channels: int | None,
    communicator: Communicator,
    /,
    *,
    weighting: Weighting,
) -> tuple[Tensor, BatchStatistics]:
    """Normalize an input, with one message each way. Collective.

    The input is run by the layer's plan for such inputs, or is checked, `num_channels` included,
    and the layer gets a plan.
    """
    layer = communicator if isinstance(communicator, LayerCommunicator) else None
    key = None if layer is None else autograd.guard(args, weighting)
    plan = None if layer is None else layer.plans.get(key)
    if plan is not None:
        y, batch = autograd.forward(plan, args)
        return y, unpack(batch)
    if dtensors.among((args.x, args.weight, args.bias)):
        if dtensors.among([args.x]):
            check_input(args.x, num_channels)  # not each rank's part, so that all ranks raise
        function = partial(forward, weighting=weighting)
        return dtensors.forward(function, args, num_channels, communicator)
    check(args, num_channels, communicator)
    if autograd.is_transformed() or get_dispatch_mode(MAKE_FX):
        return autograd.differentiable_forward(args, communicator, weighting=weighting)
    needed = autograd.needs_gradient(args.x)
    with torch.no_grad():  # as the pass runs, for which any kernels will do
        plan = Plan(args, communicator, weighting=weighting, needs_gradient=needed)
    if layer is not None and key is not None:
        layer.keep(key, plan)
    y, batch = autograd.forward(plan, args)
    return y, unpack(batch)


def check(args: NormArgs, num_channels: int | None, communicator: Communicator) -> None:
    """Raise unless a layer can normalize this input, here and now. Collective if it raises."""
    data_parallel.watch_active()
    ddp: Any = getattr(DistributedDataParallel, ACTIVE_DDP, None)
    # Inside its join, a rank without data runs the collectives of DistributedDataParallel only,
    # which the other ranks would take for a layer's.
    joins = ddp is not None and ddp._join_config.enable
    if joins and not ddp._join_config.throw_on_early_termination and communicator.size > 1:
        raise RuntimeError(
            "layers that share statistics cannot be trained inside DistributedDataParallel.join: "
            f"that join does not know of their communication over {communicator.size} ranks. Use "
            "multibn.torch.join, or join(throw_on_early_termination=True), which ends "
            "with the first rank that runs out of data."
        )
    if get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace, which some exporters and counters of operations call, cannot trace "
            "layers that compute statistics of a batch. Call model.eval() first, or trace a copy "
            "of the model after revert_sync_batchnorm."
        )
    try:
        check_plain("the input", args.x)
        check_plain("`residual`", args.residual)
        check_input(args.x, num_channels)
        if args.x.is_meta and communicator.size > 1:
            raise TypeError("the input must have data: got meta. Use a layer for shapes.")
        check_options(args)
        if not autograd.is_transformed():  # these have no kernels, and may be compiled
            kernels.select(args.x.detach())  # may warn, which may be an error of this rank alone
    except (TypeError, ValueError, Warning) as error:
        if isinstance(args.x, Tensor) and len(args.axis) < args.x.ndim - 1:  # splits
            num_channels = math.prod(channels(args.x.shape, args.axis))
        refuse(error, args.x, num_channels, communicator)


def all_but_channels(x: Any, /) -> tuple[int, ...]:
    """The axes of an input `(N, C, *spatial)` that a layer reduces; `x` need not be a tensor."""
    return 0, *range(2, getattr(x, "ndim", 2))


def normalize_by_running(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    /,
    *,
    eps: float,
) -> Tensor:
    """Normalize `x` by running statistics, whose axes are those of `x` from 1. Not collective.

    Without them, by the statistics of this process's batch, as torch computes them.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    if dtensors.among((x, weight, running_mean)):
        function = partial(normalize_by_running, eps=eps)
        return dtensors.evaluate(function, x, weight, bias, running_mean, running_var)
    wide = torch.promote_types(x.dtype, torch.float32)
    parameters = {p.dtype for p in (weight, bias, running_mean) if p is not None}
    if running_mean.ndim == 1 and len(parameters) == 1 and parameters <= {x.dtype, wide}:
        is_eager = not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        if is_eager and torch.is_grad_enabled():  # these may move before the backward pass
            running_mean, running_var = running_mean.clone(), running_var.clone()
        return F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    # F.batch_norm refuses the other mixtures of dtypes, which training accepts, and would copy some
    # inputs with splits.
    axis = statistics.reduced_axes(x.ndim, range(1, 1 + running_mean.ndim))
    args = NormArgs(x, weight, bias, eps, axis)
    check_options(args)
    mean, var = map(steps.as_wide, (running_mean, running_var))
    y: Tensor = reference.normalize(args, BatchStatistics(mean, var, mean, mean))
    return y


def check_input(x: Any, num_channels: int | None, /) -> None:
    """Raise unless `x` is a floating-point tensor of shape `(N, num_channels, *spatial)`.

    `num_channels=None` accepts any number but 0. Not collective: see `refuse`.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a torch.Tensor: got {type(x).__qualname__}.")
    check_dense("the input", x)
    shape = x.shape
    if torch.jit.is_tracing():  # sizes are tensors there, and a look at them is a warning
        return
    if len(shape) < 2:
        raise ValueError(
            f"the input must have 2 or more dimensions, (N, C, *spatial): got shape {tuple(shape)}."
        )
    if shape[1] == 0:
        raise ValueError(f"the input must have channels: got 0 in shape {tuple(shape)}.")
    if num_channels is not None and shape[1] != num_channels:
        cure = " Channels last: pass x.movedim(-1, 1)." if shape[-1] == num_channels else ""
        raise ValueError(
            f"the input must have {num_channels} channels in dimension 1, as many as the layer's "
            "`num_features` or the length of `weight` and `bias`: "
            f"got {shape[1]} in shape {tuple(shape)}.{cure}"
        )
    if not x.dtype.is_floating_point:
        raise statistics.not_floating(x)


def check_dense(name: str, x: Any, /) -> None:
    """Raise if `x` is a tensor without a shape or without an element in memory for each place."""
    if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
        kind, call = f"layout {x.layout}", "to_dense()"
        if x.is_nested:
            kind, call = f"a nested one of {kind}", "values() or torch.nested.to_padded_tensor"
        raise TypeError(f"{name} must be a dense tensor: got {kind}. Call {call} on it.")


def check_plain(name: str, x: Any, /) -> None:
    """Raise if the class of `x` has operations of its own: the numbers of a step are elsewhere."""
    kind = type(x)
    if not isinstance(x, Tensor) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return
    # Operations of torch.distributed's give plain results, and fake tensors have no numbers.
    if not (kind.__module__.startswith("torch.distributed.") or isinstance(x, FakeTensor)):
        raise TypeError(
            f"{name} must be a plain tensor: got a {kind.__qualname__}, whose class has a "
            "`__torch_dispatch__`. Pass the tensor that it wraps, and say by `mask` of the layer "
            "which elements do not count."
        )


def check_options(args: NormArgs) -> None:
    """Raise unless the parameters, `eps` and the residual fit the input, which was checked."""
    x, eps, axis, residual, running = args.x, args.eps, args.axis, args.residual, args.running
    if not (isinstance(eps, float) and 0 < eps < math.inf):
        check_eps(eps)
    shape = x.shape[1:2]
    if 1 in axis or len(axis) != x.ndim - 1:
        shape = channels(x.shape, axis)
    for name, p in (("weight", args.weight), ("bias", args.bias)):
        if p is not None and (p.shape != shape or not p.is_floating_point()):
            raise ValueError(
                f"`{name}` must have shape {tuple(shape)}, a number for each channel of the input, "
                f"in floating point: got {tuple(p.shape)} in {p.dtype}."
            )
    parts = [("weight", args.weight), ("bias", args.bias), ("residual", residual)]
    if type(running) is Running:
        size, sizes = math.prod(shape), (running.mean.numel(), running.var.numel())
        if sizes != (size, size):
            raise ValueError(
                f"`running_mean` and `running_var` must have {size} numbers each, one for each "
                f"channel of the input: got {sizes[0]} and {sizes[1]}."
            )
        parts += [("running_mean", running.mean), ("running_var", running.var)]
    if residual is not None:
        check_dense("`residual`", residual)
        check_residual(residual, x, Tensor, "a torch.Tensor")
    device = x.device
    for name, p in parts:
        if p is not None and p.device != device:
            raise ValueError(
                f"`{name}` must be on the device of the input, {device}: got {p.device}. Call "
                "`to` on the input or on the model."
            )


def refuse(
    error: Exception, x: Any, num_channels: int | None, communicator: Communicator
) -> NoReturn:
    """Raise `error`, and let the other ranks raise too. Collective.

    Over a communicator without a channel, the message that the other ranks expect has a length that
    depends on the channels: where nobody knows these, this rank raises alone.
    """
    is_tensor = isinstance(x, Tensor)
    if not num_channels and is_tensor and not x.is_nested and x.ndim > 1:
        num_channels = x.shape[1]
    if num_channels:
        where = x.device if is_tensor and not x.is_meta else "cpu"
        like = torch.empty(0, dtype=torch.float32, device=where)
        statistics.refuse(communicator, num_channels, like=like, error=error)
    else:
        layer_communicator.refuse(communicator, error)
    raise error


class BatchNormMode(TorchFunctionMode):
    """A context in which `batch_norm` takes the calls of torch.nn.functional.batch_norm."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.batch_norm if func is F.batch_norm else func)(*args, **kwargs or {})

    def batch_norm(self, *args: Any, **options: Any) -> Any:
        """Do what the mode is for; calls of torch's function in here go to torch."""
        raise NotImplementedError
