"""Precise batch norm: running statistics from whole passes over data.

Precise batch norm (Wu & Johnson, 2021, arXiv:2105.07576, section 3) replaces the running averages
of training, which lag behind the weights, by statistics of many batches under the final weights.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from multibn import wire
from multibn._typing import check_bool, check_choice, check_int
from multibn._warnings import warn
from multibn.communicators import Communicator, CommunicatorLike, SingleProcess, as_communicator
from multibn.communicators.layer_communicator import for_phase
from multibn.communicators.nonfinite import skips
from multibn.engine.precise import Estimate, Population, PopulationRun, input_of, length_of
from multibn.engine.running import PopulationEstimator, running_variance
from multibn.engine.statistics import OneValueError, aggregate, local_moments
from multibn.kernels import steps
from multibn.torch_backend.layer import functional, validation
from multibn.torch_backend.layer.autograd import without_autocast
from multibn.torch_backend.layer.base import SyncNormBase, check_module, replaced, running_tensors
from multibn.torch_backend.layer.sub_batch_norm import _SubBatchNorm
from multibn.torch_backend.train.join import tensors_in
from multibn.torch_backend.train.synchrony import participants

Estimator: TypeAlias = Literal["population", "mean_of_var"]
# Argument names that suggest padding.
_MASK = re.compile("(mask|len|length)s?$")


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
    the states of torch's default random generators, of the CPU and of the model's devices, are as
    before. After an exception everything is as before.

    Collective: every rank of `process_group` must call it, with the same arguments but for the
    data. Besides the layers' own messages, each batch has one small allreduce, and each layer of C
    channels one of 2C+2 numbers at the end; with `estimator="mean_of_var"`, each forward pass of a
    synchronized layer has one more of 2C+4. Loaders may differ in length: a rank without data left
    takes part in the messages of synchronized layers, but a model that communicates in other ways
    (FSDP) needs equally many batches on every rank.

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
        batches on each rank. The first tensor of a batch has the samples on its first dimension; of
        a PackedSequence, its sequences are the samples.
    estimator
        `"population"`: exact mean and variance of all elements of the layer's inputs on all ranks,
        for batches of any sizes; the variance is unbiased: times N/(N-1), where N is the number of
        elements per channel over all ranks and batches. `"mean_of_var"` (mmpretrain): the means
        over batches and ranks of the batches' means and unbiased variances; it leaves out the
        variance between batches, and all batches have the same weight. For a synchronized layer, a
        batch is the global batch of its ranks; for a layer made by `convert_sub_batchnorm`, each
        split is a batch of its own.
    forward_fn
        Called as `forward_fn(model, batch)`. Default: `model(batch)`, or `model(batch[0])` for a
        plain tuple or list. A named tuple or PackedSequence is passed as it is.
    process_group
        The ranks whose data is pooled, as in `check_sync`. The group should contain those of the
        model's synchronized layers.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    ValueError
        On all ranks, if no rank's loader had a batch, or if a rank's loader had none and the model
        has synchronized layers. Also if an argument is invalid; for `process_group` as
        `check_sync`.
    TypeError
        If a number is no int or `progress` no bool. If `num_samples` is an int and a batch has no
        tensor. If `model` is not a module (the arguments may be swapped), or if the model cannot be
        called with a batch and there is no `forward_fn`.
    RuntimeError
        On the other ranks, if one rank's loader raised.

    Warns
    -----
    UserWarning
        If the loader ended before `num_samples` or `num_iters`, a layer had no input and keeps its
        statistics, there is no layer to update, or the model takes lengths or masks but only the
        first element of each batch is passed to it.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from multibn.torch import update_bn_stats
    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> loader = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0], [9.0]])]
    >>> update_bn_stats(model, loader)
    >>> model[0].running_mean
    tensor([5.])
    """
    check_module(
        "model",
        model,
        "The order is `update_bn_stats(model, data_loader)`; torch.optim.swa_utils.update_bn takes "
        "them in the opposite order.",
    )
    check_arguments(num_samples, num_iters, estimator)
    check_bool(progress=progress)
    inner = _innermost(model)
    layers = list(_layers_in_training(inner, estimator))
    if not any(layer.tracking for layer in layers):
        warn(
            "`model` has no batch norm layer in training mode with running statistics: nothing to "
            "update. Call model.train() first, if the model has batch norms."
        )
        return
    left_out: set[str] = set()
    forward = forward_fn or partial(_forward, left_out=left_out)
    known = [n for n in (num_iters, length_of(data_loader)) if n]
    communicator = participants(model, process_group)
    run = PopulationRun(layers, communicator, title="precise batch norm", source="`data_loader`")
    with _unchanged(inner), torch.no_grad(), ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # compiled code does not see new hooks
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        of_torch = [layer for layer in layers if not isinstance(layer.module, SyncNormBase)]
        for layer in of_torch:
            hooks.enter_context(layer.watched(run))
        mode = functional.BatchNormMode()
        mode.batch_norm = partial(_record_and_normalize, of_torch)
        hooks.enter_context(mode)
        _sleep_before_fork()
        early_end = run.run(
            data_loader,
            partial(forward, inner),
            progress=progress,
            total=min(known) if known and num_samples is None else None,
            num_iters=num_iters,
            num_samples=num_samples,
            samples_in=None if num_samples is None else _batch_size,
        )
    unseen = [layer.name for layer, has_data in run.write() if not has_data]
    # After the last collective: where warnings are errors, one rank alone may raise here.
    warn(early_end)
    if unseen:
        warn(
            f"batch norm layer(s) {', '.join(unseen)} saw no data on any rank and keep their "
            "running statistics. Freeze them with eval(), or pass a `forward_fn` that uses them."
        )
    if left_out:
        warn(
            f"`model` takes {', '.join(sorted(left_out))}, but only the first element of each "
            "batch was passed to it, so padding, if any, is included in the statistics. Pass "
            "`forward_fn=lambda model, batch: model(*batch)`, or `model(batch[0])` if this is "
            "right."
        )


def check_arguments(num_samples: object, num_iters: object, estimator: object) -> None:
    """Raise as `update_bn_stats` for these arguments. Hooks call this when they are built."""
    check_choice("estimator", estimator, Estimator)
    check_int("num_samples", num_samples, none="no limit")
    check_int("num_iters", num_iters, none="no limit")


def _sleep_before_fork() -> None:
    """Wait for gloo's threads to go idle before DataLoader workers are forked.

    Before Python 3.12, a fork made while such a thread enters Python inherits a locked mutex of the
    interpreter, and waits for it for ever.
    """
    if sys.version_info < (3, 12) and dist.is_available() and dist.is_initialized():
        time.sleep(0.1)


def _innermost(model: nn.Module) -> nn.Module:
    """Return `model` without DDP, DataParallel and torch.compile; DDP would also communicate."""
    wrappers = nn.parallel.DistributedDataParallel, nn.DataParallel
    # torch.compile names the module "_orig_mod".
    inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
    return _innermost(inner) if isinstance(inner, nn.Module) else model


def _forward(model: nn.Module, batch: Any, *, left_out: set[str]) -> None:
    """Call the model with a batch, or with the first element of a plain tuple or list.

    If there are others, add to `left_out` the masks and lengths among the parameters of its
    `forward`, which get no argument.
    """
    has_several = type(batch) in (tuple, list)
    if has_several and len(batch) > 1:
        with suppress(TypeError, ValueError):  # a function in C has no signature
            left_out.update(filter(_MASK.search, inspect.signature(model.forward).parameters))
    try:
        model(batch[0] if has_several else batch)
    except (TypeError, AttributeError, ValueError, NotImplementedError) as error:
        if isinstance(error, OneValueError if has_several else ValueError):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"`model({'batch[0]' if has_several else 'batch'})` failed for a batch of type "
            f"{type(batch).__qualname__}: {str(error).rstrip('.')}. Pass the right call as "
            "`forward_fn`, for example "
            "`forward_fn=lambda model, batch: model(**batch)`; `model(batch)` for "
            "SlowFast's lists of pathways, or `model(*batch)`."
        ) from error


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
    """Restore modes, buffers (in place) and the states of the default random generators."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    tensors = list(model.buffers())
    for m in model.modules():
        places += [(m._buffers, name, buffer) for name, buffer in m._buffers.items()]
        # None suspends a surrounding step_statistics(): these batches are not part of it.
        attributes = {"training": m.training, "step_accumulator": None}
        places += [(vars(m), name, v) for name, v in attributes.items() if name in vars(m)]
        tensors += running_tensors(m) if isinstance(m, _BatchNorm) else []
    before = [t.clone() for t in tensors]
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    try:
        with replaced(places), torch.random.fork_rng([]), ExitStack() as generators:
            for device in devices - {torch.device("cpu")}:
                generators.enter_context(torch.random.fork_rng([device], device_type=device.type))
            yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, before, strict=True):
                t.copy_(value)


class _MeanOfVar(PopulationEstimator):
    """Averages the batches' means and unbiased variances.

    The variances are stored where the base class stores mean squares.
    """

    def __init__(self, like: Tensor, shared_by: Communicator, /) -> None:
        super().__init__(like)
        self._shared_by = shared_by

    def sums_of(self, x: Tensor, /, *, axis: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
        moments = local_moments(x, axis=axis, mask=mask)
        if skips(self._shared_by, x.dtype) and not moments.meansqr.sum().isfinite():
            moments = local_moments(x[:0], axis=axis)  # the layer itself warns that it skips
        # A "forward" message, so that it matches that of a rank whose layer rejects its input.
        n = wire.forward_payload(moments.mean.numel())
        batch = aggregate(moments, for_phase(self._shared_by, "forward", moments.mean.dtype, n))
        var = running_variance(batch, local_count=0)
        has_data = steps.as_wide(batch.count > 0)  # on all ranks that share the batch
        return steps.pack(batch.mean, var, has_data, has_data)

    def estimate(self, communicator: Communicator, /) -> Estimate:
        sums = communicator.allreduce(self._sums)
        mean, var = steps.split_sums(sums / sums[-1].clamp(min=1), self.shape)
        return mean, var, sums[-1] > 0


class _WatchedNorm:
    """A batch norm in training mode, with an estimator of its running statistics.

    `norms` are the modules that may have running statistics: the layer itself, or the two parts of
    a sub-batch norm. `tracking` are those that do. A layer that has none is watched, too: in
    training it may communicate.
    """

    def __init__(
        self, name: str, module: nn.Module, norms: Sequence[_BatchNorm], estimator: Estimator
    ) -> None:
        self.name = name or type(module).__name__
        self.module = module
        self.communicator: Communicator = SingleProcess()
        if isinstance(module, SyncNormBase):
            self.communicator = module.layer_communicator
        elif isinstance(module, nn.SyncBatchNorm):
            self.communicator = as_communicator(module.process_group)
        self.num_features = norms[0].num_features
        self.tracking: list[Any] = [norm for norm in norms if norm.running_mean is not None]
        self.is_recorded = False  # whether the present call has passed its input to `add`
        self.estimator: Population | _MeanOfVar | None = None
        if self.tracking:
            like = self.tracking[0].running_mean
            exact = estimator == "population"
            self.estimator = Population(like) if exact else _MeanOfVar(like, self.communicator)

    def watched(self, run: PopulationRun) -> RemovableHandle:
        """Register a hook that adds inputs which `_record_and_normalize` has not seen.

        These are the inputs of an nn.SyncBatchNorm, whose calls the hook also registers with `run`,
        to repeat them once this rank has run out of data.
        """

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            if module is not self.module:  # a shallow copy shares the hooks of its original
                return
            x = input_of(args, kwargs)
            if not self.is_recorded:
                self.add(x)
            self.is_recorded = False
            if self.communicator.size > 1 and isinstance(x, Tensor):
                run.repeat(partial(module, x.new_empty((0, *x.shape[1:]))))

        return self.module.register_forward_hook(note, with_kwargs=True)

    def add(self, x: Any) -> None:
        """Add an input, unless the layer will reject it."""
        if self.estimator is None:
            return
        try:
            validation.check_input(x, self.num_features)
        except (TypeError, ValueError):
            return
        with without_autocast(x):
            sums = self.estimator.sums_of(x.detach(), axis=validation.non_channel_axes(x))
            self.estimator.add(sums)

    def write(self, mean: Tensor, var: Tensor, /) -> None:
        """Write running statistics; all splits of a sub-batch norm get the same ones."""
        for norm in self.tracking:
            norm.running_mean.view(-1, self.num_features).copy_(mean)
            norm.running_var.view(-1, self.num_features).copy_(var)


def _record_and_normalize(
    layers: Sequence[_WatchedNorm], input: Any, running_mean: Any, *args: Any, **options: Any
) -> Tensor:
    """Call F.batch_norm, and add its input to the layer of `layers` that has `running_mean`."""
    for layer in layers:
        if running_mean is layer.module.running_mean:
            layer.add(input)
            layer.is_recorded = True
    return F.batch_norm(input, running_mean, *args, **options)


def _layers_in_training(model: nn.Module, estimator: Estimator) -> Iterator[_WatchedNorm]:
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, _SubBatchNorm):
            norms = [module.bn, module.split_bn]
            parts.update(norms)
            if module.training and module.split_bn.training:  # see `SubBatchNorm3d.split_bn`
                yield _WatchedNorm(name, module, norms, estimator)
        elif isinstance(module, _BatchNorm) and module.training and module not in parts:
            yield _WatchedNorm(name, module, [module], estimator)
