"""Running statistics from whole passes over data: precise batch norm.

"Precise" batch norm (Wu & Johnson, 2021, arXiv:2105.07576, section 3) replaces the running averages
of training, which lag behind the weights, by statistics of many batches under the final weights.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from multibn import lockstep
from multibn._progress import progress as show_progress
from multibn._typing import check_choice
from multibn.torch_backend.participants import participants
from multibn.torch_backend.precise_bn.estimators import Estimator
from multibn.torch_backend.precise_bn.watched import WatchedNorm, layers_in_training


def update_bn_stats(
    model: nn.Module,
    data_loader: Iterable[Any],
    *,
    num_samples: int | None = None,
    num_iters: int | None = None,
    estimator: Estimator = "population",
    forward_fn: Callable[[Any, Any], object] | None = None,
    process_group: Any = None,
    progress: bool = True,
) -> None:
    """Replace the running statistics of a model's batch norms by statistics of the loader's data.

    The model runs forward on the batches without gradients, each layer in its present mode, so that
    deeper layers see what they see in training; synchronized layers go on sharing their statistics.
    Nothing but the running mean and variance of the layers is changed: other buffers, counters,
    modes, hooks and the state of torch's random numbers are as before, and after an exception the
    running statistics are too.

    Collective: every rank of `process_group` must call it, with the same arguments but for the
    data. Ranks proceed batch by batch together (one small allreduce each), so loaders may differ in
    length; a rank that has run out takes part in the others' synchronized layers with empty
    batches. At the end there is one allreduce of 2C+2 numbers for each layer of C channels.

    Parameters
    ----------
    model
        Layers that are trained here: any `_BatchNorm` in training mode with running statistics
        (plain, synchronized, naive), and sub-batch norms. Those in eval mode, and those without
        running statistics, are left alone. Of a DistributedDataParallel or compiled model, the
        module within is run.
    data_loader
        Any iterable of batches, this rank's share of the data.
    num_samples
        Stop as soon as the ranks together have seen so many samples, in whole batches; a batch's
        samples are the first dimension of the first tensor in it. Default: no limit.
    num_iters
        Stop after so many batches on each rank. Default: no limit.
    estimator
        `"population"`: exact mean and variance of all elements that all ranks' layers were shown,
        batches and ranks of unequal sizes included; the variance is unbiased, times N/(N-1) with N
        the number of elements per channel of all of them. `"mean_of_var"`: the mean over batches
        of their means and of their unbiased variances, and the mean over ranks of that
        (mmpretrain); it leaves out the variance between batches, and all batches weigh the same.
        A batch of a synchronized layer is that of all its ranks.
    forward_fn
        Called as `forward_fn(model, batch)`. Default: `model(batch)`, or `model(batch[0])` for a
        tuple or list.
    process_group
        The ranks whose data is pooled, anything that `multibn.as_communicator` takes. It should
        contain the groups of the model's synchronized layers. Default: those of a
        DistributedDataParallel in the model; else the largest group of its synchronized layers, or
        torch's default process group if that is larger.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    ValueError
        On all ranks, if no rank's loader gave a batch, or if a rank's loader gave none and the
        model has synchronized layers. If an argument has another value than those above. If
        `process_group` is None and a launcher started several processes, but neither the model's
        layers nor torch.distributed tell of any other than this one.
    TypeError
        If `num_samples` is given and a batch has no tensor in it.
    RuntimeError
        On the other ranks, if one rank's loader raised.

    Warns
    -----
    UserWarning
        If the loader ended before `num_samples` or `num_iters`; the batches that came are used.
        For a layer that was shown no data; it keeps its statistics. If no layer was found.

    Notes
    -----
    A loader with augmentations gives statistics of augmented data. A model whose forward pass
    communicates in other ways (FSDP) needs equally many batches on every rank.
    """
    check_choice("estimator", estimator, Estimator)
    for name, value in (("num_samples", num_samples), ("num_iters", num_iters)):
        if value is not None and value <= 0:
            raise ValueError(f"`{name}` must be positive, or None for no limit: got {value}.")
    wrapped, model = model, _innermost(model)
    layers = list(layers_in_training(model, estimator))
    tracked = [layer for layer in layers if layer.keepers]
    if not tracked:
        warnings.warn(
            "`model` has no batch norm layer in training mode with running statistics: nothing to "
            "update. Call model.train() first.",
            stacklevel=2,
        )
        return
    communicator = participants(wrapped, process_group)
    rank = communicator.rank
    steps = lockstep.Lockstep(
        data_loader,
        communicator,
        source="`data_loader`",
        amount=None if num_samples is None else _batch_size,
    )
    num_steps = num_batches = samples = 0
    with (
        _watched(model, layers) as visits,
        show_progress(
            progress and rank == 0,
            "precise batch norm",
            _num_batches(data_loader, num_samples, num_iters),
        ) as advance,
    ):
        for step in lockstep.run(
            islice(steps, num_iters),
            partial(_forward if forward_fn is None else forward_fn, model),
            visits,
            [layer.communicator for layer in layers],
            source="`data_loader`",
            layers="synchronized layers",
            otherwise="or freeze the layers with eval()",
        ):
            num_steps += 1
            num_batches += step.batch is not lockstep.END
            samples += step.amount
            advance()
            if num_samples is not None and samples >= num_samples:
                break
        estimates = [layer.estimator.estimate(communicator) for layer in tracked]
    unseen = []
    for layer, new in zip(tracked, estimates, strict=True):
        if new.any_data:
            layer.write(new)
        else:
            unseen.append(layer.name)
    # Warnings may be errors, on one rank only: what is collective has been done by now.
    enough = num_samples is not None and samples >= num_samples
    ended = ""
    if num_iters is not None and num_batches < (num_steps if enough else num_iters):
        ended = (
            f"`num_iters` is {num_iters}: `data_loader` ended after {num_batches} on rank {rank}"
        )
    elif num_samples is not None and not enough and num_steps != num_iters:
        ended = f"`num_samples` is {num_samples}: `data_loader` ended after {samples} on all ranks"
    if ended:
        warnings.warn(f"{ended}. The batches that came were used.", stacklevel=2)
    if unseen:
        warnings.warn(
            f"batch norm layer(s) {', '.join(unseen)} saw no data on any rank and keep their "
            "running statistics. Freeze them with eval(), or pass a `forward_fn` that uses them.",
            stacklevel=2,
        )


def _innermost(model: nn.Module) -> nn.Module:
    """`model` without its wrappers: those of torch's data parallelism communicate, too."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile's
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _forward(model: nn.Module, batch: Any) -> None:
    model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _batch_size(batch: Any) -> int:
    for tensor in _tensors(batch):
        return int(tensor.shape[0]) if tensor.ndim else 1
    raise TypeError(
        f"`num_samples` needs batches with a tensor in them: got {type(batch).__qualname__}. Pass "
        "`num_iters` instead."
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)


@contextmanager
def _watched(
    model: nn.Module, layers: Iterable[WatchedNorm]
) -> Iterator[list[Callable[[], object]]]:
    """Context in which `layers` note what they are shown, and in which the model stays as it is.

    Yields the list in which they note their visits, see `lockstep.run`.
    """
    visits: list[Callable[[], object]] = []
    with _unchanged(model), torch.no_grad(), ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # compiled code does not see new hooks
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            hooks.enter_context(layer.watched(visits))
        yield visits


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back modes, all buffers, which are the same objects, and random states."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [
        (m, name, b, None if b is None else b.clone())
        for m in model.modules()
        for name, b in m._buffers.items()
    ]
    gpus = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)


def _num_batches(
    data_loader: Iterable[Any], num_samples: int | None, num_iters: int | None
) -> int | None:
    """As far as it is known beforehand."""
    known = [n for n in (num_iters, length_hint(data_loader)) if n]
    return min(known) if known and num_samples is None else None
