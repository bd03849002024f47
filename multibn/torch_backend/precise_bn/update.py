"""Precise batch norm: running statistics from whole passes over data.

Precise batch norm (Wu & Johnson, 2021, arXiv:2105.07576, section 3) replaces the running averages
of training, which lag behind the weights, by statistics of many batches under the final weights.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from multibn._typing import check_choice, check_int
from multibn.communicators import CommunicatorLike
from multibn.engine.population import Pool
from multibn.engine.precise import Pass
from multibn.torch_backend.precise_bn.watched import Estimator, layers_in_training
from multibn.torch_backend.train.synchrony import participants
from multibn.torch_backend.train.uneven import tensors_in


def update_bn_stats(
    model: nn.Module,
    data_loader: Iterable[Any],
    *,
    num_samples: int | None = None,
    num_iters: int | None = None,
    estimator: Estimator = "population",
    forward_fn: Callable[[Any, Any], object] | None = None,
    process_group: CommunicatorLike = None,
    progress: bool = True,
) -> None:
    """Replace the running statistics of a model's batch norms by statistics of the loader's data.

    The model runs forward on the batches without gradients. Each layer stays in its present mode,
    so that deeper layers get the same inputs as in training, and synchronized layers share their
    statistics. Only running means and variances change: other buffers, counters, modes, hooks and
    the state of torch's random numbers are as before. After an exception everything is as before.

    Collective: every rank of `process_group` must call it, with the same arguments but for the
    data. Each batch has one small allreduce, and each layer of C channels one of 2C+2 numbers at
    the end. Loaders may differ in length: a rank without data left takes part in synchronized
    layers with empty batches, but a model that communicates in other ways (FSDP) needs equally many
    batches on every rank.

    Parameters
    ----------
    model
        Its batch norms in training mode with running statistics (plain, synchronized, naive,
        sub-batch) are updated. A DistributedDataParallel or a compiled model runs without its
        wrapper.
    data_loader
        Any iterable of batches, this rank's share of the data.
    num_samples, num_iters
        Stop after this many samples on all ranks together, in whole batches, or after this many
        batches on each rank. The first tensor of a batch has the samples on its first dimension.
    estimator
        `"population"`: exact mean and variance of all elements of the layer's inputs on all ranks,
        for batches of any sizes; the variance is unbiased, times N/(N-1) with N these elements per
        channel. `"mean_of_var"` (mmpretrain): the means over batches and ranks of the batches'
        means and unbiased variances; it leaves out the variance between batches, and all batches
        have the same weight. A batch of a synchronized layer is that of all its ranks, of a layer
        of `convert_sub_batchnorm` one of its parts.
    forward_fn
        Called as `forward_fn(model, batch)`. Default: `model(batch)`, or `model(batch[0])` for a
        tuple or list.
    process_group
        The ranks whose data is pooled, as in `check_sync`. It should contain the groups of the
        model's synchronized layers.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    ValueError
        On all ranks, if no rank's loader had a batch, or if a rank's loader had none and the
        model has synchronized layers. If an argument has another value than those above; for
        `process_group` as `check_sync`.
    TypeError
        If a number is no int, or if `num_samples` is an int and a batch contains no tensor.
    RuntimeError
        On the other ranks, if one rank's loader raised.

    Warns
    -----
    UserWarning
        If the loader ended before `num_samples` or `num_iters`, a layer had no input and keeps its
        statistics, or there is no layer to update.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch_backend import update_bn_stats
    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> loader = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0], [9.0]])]
    >>> update_bn_stats(model, loader)
    >>> model[0].running_mean
    tensor([5.])
    """
    check_arguments(num_samples, num_iters, estimator)
    inner = _innermost(model)
    layers = list(layers_in_training(inner, estimator))
    if not any(layer.tracking for layer in layers):
        warnings.warn(
            "`model` has no batch norm layer in training mode with running statistics: nothing to "
            "update. Call model.train() first.",
            stacklevel=2,
        )
        return
    known = [n for n in (num_iters, length_hint(data_loader)) if n]
    world = participants(model, process_group)
    run = Pass(layers, world, title="precise batch norm", source="`data_loader`")
    with _unchanged(inner), torch.no_grad(), ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # compiled code does not see new hooks
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            hooks.enter_context(layer.watched(run))
        early_end = run.run(
            data_loader,
            partial(_forward if forward_fn is None else forward_fn, inner),
            progress=progress,
            total=min(known) if known and num_samples is None else None,
            num_iters=num_iters,
            num_samples=num_samples,
            samples_in=None if num_samples is None else _batch_size,
        )
    unseen = [layer.name for layer, has_data in run.write() if not has_data]
    # Last, after all that is collective: where warnings are errors, one rank alone may raise here.
    if early_end:
        warnings.warn(early_end, stacklevel=2)
    if unseen:
        warnings.warn(
            f"batch norm layer(s) {', '.join(unseen)} saw no data on any rank and keep their "
            "running statistics. Freeze them with eval(), or pass a `forward_fn` that uses them.",
            stacklevel=2,
        )


def check_arguments(num_samples: object, num_iters: object, estimator: object) -> None:
    """Raise as `update_bn_stats` for these arguments. Hooks call this when they are built."""
    check_choice("estimator", estimator, Estimator)
    check_int("num_samples", num_samples, none="no limit")
    check_int("num_iters", num_iters, none="no limit")


def _innermost(model: nn.Module) -> nn.Module:
    """`model` without its wrappers, of which torch's data parallelism would communicate, too."""
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel
    # torch.compile names the module "_orig_mod".
    inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
    return _innermost(inner) if isinstance(inner, nn.Module) else model


def _forward(model: nn.Module, batch: Any) -> None:
    model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _batch_size(batch: Any) -> int:
    tensors = tensors_in(batch)
    if not tensors:
        raise TypeError(
            "`num_samples` needs batches with a tensor in them: got "
            f"{type(batch).__qualname__}. Pass `num_iters` instead."
        )
    return int(tensors[0].shape[:1].numel())


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers (in place) and random states."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [
        (m, name, b, None if b is None else b.clone())
        for m in model.modules()
        for name, b in m._buffers.items()
    ]
    # Of a step of `step_statistics`, which these batches have no part in.
    layers = [m for m in model.modules() if isinstance(vars(m).get("pool"), Pool)]
    pools = [(layer, layer.__dict__.pop("pool")) for layer in layers]
    gpus = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for layer, pool in pools:
            layer.__dict__["pool"] = pool
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)


def second_reader(data_loader: Any, /) -> Any:
    """A loader of the same data with its own workers, for a pass during another one.

    A DataLoader with persistent workers has only one iterator. A second loop over the same loader
    would restart the first loop's iterator.
    """
    if not isinstance(data_loader, DataLoader):
        return data_loader
    reader = copy.copy(data_loader)
    reader._iterator = None
    return reader
