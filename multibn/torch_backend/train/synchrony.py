"""Keep models equal on all ranks: check them, average gradients, pool running statistics."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from multibn import wire
from multibn._arrays import to_host
from multibn._typing import check_choice
from multibn.communicators import Communicator, CommunicatorLike, as_communicator
from multibn.communicators.channel import at
from multibn.communicators.diagnostics import describe_ranks, display_name
from multibn.communicators.handshake import all_ranks_agree
from multibn.engine.consistency import check_equal, common_group, differences
from multibn.engine.running import pool_running
from multibn.kernels.steps import as_wide
from multibn.torch_backend._torch_private import (
    flatten_dense_tensors,
    not_compiled,
    unflatten_dense_tensors,
)
from multibn.torch_backend.layer import dtensors
from multibn.torch_backend.layer.base import LOCAL, SyncNormBase, check_module

How: TypeAlias = Literal["broadcast", "pool"]


def participants(model: nn.Module, process_group: CommunicatorLike, /) -> Communicator:
    """Return `process_group` as a Communicator, None as in `check_sync`. Not collective."""
    if process_group is not None:
        return as_communicator(process_group)
    groups: dict[str, Communicator] = {}
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            return as_communicator(module.process_group)
        if isinstance(module, SyncNormBase):
            groups[name] = module.layer_communicator.communicator
    groups = {name: group for name, group in groups.items() if group is not LOCAL}  # ghost norms
    return common_group(groups, parameter="process_group")


@not_compiled
def check_sync(
    model: nn.Module, process_group: CommunicatorLike = None, *, ignore: Iterable[str] = ()
) -> None:
    """Raise on all ranks unless they hold the same model, bit for bit, with the same options.

    After data-parallel training every rank should have the same parameters and, if the layers share
    batch statistics, the same buffers. Call this function before saving, or once an epoch: it
    copies the model to host memory.
    Collective: every rank must call it, with three small allreduces if all models are equal.

    Parameters
    ----------
    model
        Its parameters and buffers are compared; errors name them as in the state dict. If FSDP
        shards all parameters, pass `ignore=dict(model.named_parameters())` to compare the buffers.
    process_group
        The ranks to compare, anything that `multibn.as_communicator` takes. Default: the ranks of a
        DistributedDataParallel in the model; else the group that was given to all synchronized
        layers, including `multibn.SingleProcess()`; else torch's default process group. For a
        `multibn.Group`, its parent is used. Sub-batch norms without a group are ignored.
    ignore
        One or several patterns of names to leave out: `["*.running_*", "*.num_batches_tracked"]`
        for batch norms that do not share statistics.

    Raises
    ------
    ValueError
        If `process_group` is None and the model's layers have different groups; or if a launcher
        started several processes, but neither a layer nor torch.distributed has a group.
    TypeError
        If `ignore` is not one or several patterns. If an array is sharded, quantized, nested or
        without data; the other ranks then raise RuntimeError.
    RuntimeError
        On all ranks. If values differ, the message has names, ranks and the largest differences
        from most ranks; if the models are built differently, the additional and missing names.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import check_sync
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> check_sync(model)  # passes on one rank
    """
    check_module("model", model)
    parameters = dict(model.named_parameters())
    named = chain(parameters.items(), model.named_buffers())
    arrays = {name: None if is_lazy(t) else t for name, t in named}
    statistics = {
        f"{path}.{name}".lstrip(".")
        for path, layer in model.named_modules()
        if isinstance(layer, _NormBase)
        for name in layer._buffers
    }
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, SyncNormBase)]
    options = {name: vars(layer.norm_options) for name, layer in layers}
    check_equal(
        arrays,
        participants(model, process_group),
        parameters=parameters,
        statistics=statistics,
        options=options,
        ignore=ignore,
        copy_to_host=_copy_dense,
    )


def _copy_dense(t: Tensor) -> Any:
    if dtensors.contains_dtensor([t]):
        raise TypeError(
            "it is sharded over the ranks. If all parameters are sharded (FSDP2), pass "
            "`ignore=dict(model.named_parameters())` to compare the buffers alone."
        )
    return to_host(t if t.layout is torch.strided else t.to_dense())


@not_compiled
@torch.no_grad()
def sync_running_stats(
    model: nn.Module, process_group: CommunicatorLike = None, how: How = "broadcast"
) -> None:
    """Make the running statistics of all ranks equal.

    Call this function before evaluating or saving a model whose batch norms are not synchronized.
    Collective: every rank must call it with the same model. `"broadcast"` has one allreduce,
    `"pool"` two.

    Parameters
    ----------
    model
        All torch batch and instance norms in it that have running statistics are updated, in any
        mode, subclasses included.
    process_group
        The ranks whose statistics become equal, as in `check_sync`.
    how
        `"broadcast"` copies rank 0's statistics and counters `num_batches_tracked`. `"pool"` gives
        the statistics of all ranks' data, if all ranks have equal amounts of data. The mean is the
        mean of the means. The variance is the mean of the variances plus the biased variance of the
        means; for an instance norm, the mean of the variances alone. Counters do not change.

    Raises
    ------
    ValueError
        If `how` is neither of the two; for `process_group` as `check_sync`.
    FloatingPointError
        On all ranks, if a statistic to broadcast or pool is NaN or infinite, or a variance is
        negative.

    Examples
    --------
    >>> from torch import nn
    >>> from multibn.torch import sync_running_stats
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> sync_running_stats(model, how="pool")  # nothing changes on one rank
    """
    check_module("model", model)
    check_choice("how", how, How)
    named: Any = [(name, m) for name, m in model.named_modules() if isinstance(m, _NormBase)]
    layers = {k: m for k, m in named if not (m.running_mean is None or m.running_var is None)}
    if not layers:
        return
    norms, communicator = layers.values(), participants(model, process_group)
    means, variances = zip(*((m.running_mean, m.running_var) for m in norms), strict=True)
    rank, size = communicator.rank, communicator.size

    def flat(buffers: Iterable[Tensor]) -> Tensor:
        return flatten_dense_tensors([as_wide(t).to(means[0].device) for t in buffers])

    def checked_sum(a: Tensor) -> Tensor:
        summed = at(communicator, "sync_running_stats").allreduce(a)
        is_invalid = ~(summed.abs() < wire.LARGEST_SUM)
        if is_invalid.any():
            first = int(is_invalid.nonzero()[0])
            names = [name for name, m in layers.items() for _ in range(m.running_mean.numel())]
            where = describe_ranks(summed[first : first + 1].tolist(), size)
            raise FloatingPointError(
                "running statistics must be finite, and variances not negative: got invalid values "
                f"in {display_name(names[first] or 'the layer')} on {where}. Restore them from a "
                "checkpoint, or recompute them with update_bn_stats."
            )
        return summed

    mean, var = flat(means), flat(variances)
    is_valid = mean.isfinite() & var.isfinite() & (var >= 0)
    mean = torch.where(is_valid, mean, wire.rank_bit(rank))
    buffers = [*means, *variances]
    if how == "broadcast":
        counters = [c for m in norms if (c := m.num_batches_tracked) is not None]
        buffers += counters
        mine = torch.cat([mean, var, flat(counters)] if counters else [mean, var])
        # Not zero times the other ranks' buffers, which may hold NaN.
        result = checked_sum(mine if rank == 0 else torch.zeros_like(mine))
    else:
        # An instance norm's variance is the mean of the samples' variances: means do not matter.
        between = flat(
            torch.full_like(m.running_var, not isinstance(m, _InstanceNorm)) for m in norms
        )
        pooled = pool_running(mean, var, lambda a: checked_sum(a) / size, between=between)
        result = torch.cat(pooled)
    for buffer, part in zip(buffers, unflatten_dense_tensors(result, buffers), strict=True):
        buffer.copy_(part)


@not_compiled
@torch.no_grad()
def average_gradients(
    parameters: nn.Module | Iterable[Tensor], process_group: CommunicatorLike = None
) -> None:
    """Replace each parameter's gradient by its mean over the ranks.

    Use it instead of DistributedDataParallel, with any communicator, for example MPI without
    torch.distributed. Call this function between backward() and the optimizer's step.
    Collective: every rank must call it with the same parameters. One allreduce for each dtype and
    device, and a small one that compares the ranks' parameters.

    Parameters
    ----------
    parameters
        The model, or `model.parameters()`. Parameters with `requires_grad=False` are skipped. A
        missing gradient is averaged as zeros, and becomes zeros if no rank used the parameter.
        Sparse gradients become dense.
    process_group
        The ranks that train together, as in `check_sync`. For `model.parameters()`, the default is
        torch's default process group, because the layers and their groups are unknown.

    Raises
    ------
    TypeError
        If a parameter is sharded or not a tensor.
    ValueError
        For `process_group` as `check_sync`, or if `parameters` is an exhausted iterator.
    RuntimeError
        On all ranks, if the parameters' number, order, shapes, dtypes or requires_grad differ. The
        message names the ranks.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch import average_gradients
    >>> model = nn.Linear(2, 1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> average_gradients(model)  # before the optimizer's step
    >>> model.weight.grad
    tensor([[1., 1.]])
    """
    model = nn.Module()
    listed: Any = parameters
    if isinstance(parameters, nn.Module):
        model, listed = parameters, ()
    elif isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        listed = [parameters]
    named: dict[str, Any] = {f"parameters[{i}]": p for i, p in enumerate(listed)}
    named |= model.named_parameters()
    if isinstance(parameters, Iterator) and not named:
        raise ValueError(
            "`parameters` must have a parameter left: got an exhausted iterator. Pass the model "
            "or a list."
        )
    if dtensors.contains_dtensor(named.values()):
        raise TypeError(
            "`parameters` must not be sharded: got a DTensor. FSDP averages gradients by itself: "
            "remove this call."
        )
    if wrong := [p for p in named.values() if not isinstance(p, Tensor)]:
        raise TypeError(
            f"`parameters` must be tensors: got {type(wrong[0]).__qualname__}. Pass the model, or "
            "model.parameters()."
        )
    communicator = participants(model, process_group)
    facts = {name: _facts(p) for name, p in named.items()}
    # The names are not compared: one rank's model may be wrapped.
    is_equal, _ = all_ranks_agree(communicator, "average_gradients", repr([*facts.values()]))
    if not is_equal:
        raise RuntimeError(
            "`parameters` must have the same order, shapes, dtypes and requires_grad on all ranks. "
            f"{differences(facts, communicator)}. Build and freeze the model identically on "
            "all ranks, and do not pass a set."
        )
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for p in named.values():
        if p.requires_grad:
            by_kind[_grad_dtype(p), p.device].append(p)
    for (dtype, _), same_kind in by_kind.items():
        dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in same_kind]
        gradients = flatten_dense_tensors([g.to(dtype) for g in dense])
        # Divide first: the sum may overflow in float16.
        mean = at(communicator, "average_gradients").allreduce(gradients / communicator.size)
        for p, part in zip(same_kind, unflatten_dense_tensors(mean, same_kind), strict=True):
            p.grad = part


def _facts(p: Tensor) -> dict[str, str]:
    shape, dtype = str(tuple(p.shape)), str(_grad_dtype(p))
    return {"shape": shape, "dtype": dtype, "requires_grad": str(p.requires_grad)}


def _grad_dtype(p: Tensor) -> Any:
    return getattr(p, "grad_dtype", None) or p.dtype
