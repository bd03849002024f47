"""Running statistics from whole passes over data: precise batch norm.

"Precise" batch norm (Wu & Johnson, 2021, arXiv:2105.07576, section 3) replaces the running averages
of training, which lag behind the weights, by statistics of many batches under the final weights.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from operator import length_hint
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from multibn._typing import check_choice
from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.checked import during
from multibn.kernels.generic import as_wide
from multibn.population import PopulationEstimator, running_variance
from multibn.statistics import Moments, aggregate, local_moments
from multibn.torch_backend.modules import Synchronized

Estimator: TypeAlias = Literal["population", "mean_of_var"]


def update_bn_stats(
    model: nn.Module,
    data_loader: Iterable[Any],
    *,
    num_samples: int | None = None,
    num_iters: int | None = None,
    estimator: Estimator = "population",
    forward_fn: Callable[[Any, Any], object] | None = None,
    group: Any = None,
    progress: bool = True,
) -> None:
    """Replace the running statistics of a model's batch norms by statistics of the loader's data.

    The model runs forward on the batches without gradients, each layer in its present mode, so that
    deeper layers see what they see in training; synchronized layers go on sharing their statistics.
    Nothing but the running mean and variance of the layers is changed: other buffers, counters,
    modes, hooks and the state of torch's random numbers are as before, and after an exception the
    running statistics are too.

    Collective: every rank of `group` must call it, with the same arguments but for the data. Ranks
    proceed batch by batch together (one small allreduce each), so loaders may differ in length; a
    rank that has run out takes part in the others' synchronized layers with empty batches. At the
    end there is one allreduce of 2C+2 numbers for each layer of C channels.

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
    group
        The ranks whose data is pooled, anything that `multibn.as_communicator` takes: None for
        torch's default process group where one is initialised. It should contain the groups of
        the model's synchronized layers.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    ValueError
        On all ranks, if no rank's loader gave a batch, or if a rank's loader gave none and the
        model has synchronized layers. If an argument has another value than those above.
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
    communicator = as_communicator(group)
    model = _innermost(model)
    layers = list(_layers_in_training(model, estimator))
    kept = [layer for layer in layers if layer.keepers]
    if not kept:
        warnings.warn(
            "`model` has no batch norm layer in training mode with running statistics: nothing to "
            "update. Call model.train() first.",
            stacklevel=2,
        )
        return
    visits: list[tuple[nn.Module, Tensor]] = []
    with _unchanged(model), torch.no_grad(), ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # compiled code does not see new hooks
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            hooks.enter_context(layer.watched(visits))
        advance = hooks.enter_context(
            _progress(progress and communicator.rank == 0, data_loader, num_samples, num_iters)
        )
        shortage = _run_batches(
            model,
            data_loader,
            _forward if forward_fn is None else forward_fn,
            communicator,
            layers,
            visits,
            num_samples=num_samples,
            num_iters=num_iters,
            advance=advance,
        )
        estimates = [layer.estimate.compute(communicator) for layer in kept]
    unseen = []
    for layer, new in zip(kept, estimates, strict=True):
        if new.any_data:
            layer.write(new)
        else:
            unseen.append(layer.name)
    # Warnings may be errors, on one rank only: what is collective has been done by now.
    if shortage:
        warnings.warn(f"{shortage} The batches that came were used.", stacklevel=2)
    if unseen:
        warnings.warn(
            f"batch norm layer(s) {', '.join(unseen)} saw no data on any rank and keep their "
            "running statistics. Freeze them with eval(), or pass a `forward_fn` that uses them.",
            stacklevel=2,
        )


class _Estimate(NamedTuple):
    """What becomes of running mean and variance, if there was data."""

    mean: Tensor
    var: Tensor
    any_data: Tensor


class _Estimating(Protocol):
    def update(self, moments: Moments, /) -> None: ...
    def compute(self, communicator: Communicator, /) -> _Estimate: ...


class _Population:
    def __init__(self, like: Tensor, /) -> None:
        self._estimator = PopulationEstimator(like)

    def update(self, moments: Moments, /) -> None:
        self._estimator.update(moments)

    def compute(self, communicator: Communicator, /) -> _Estimate:
        batch = self._estimator.compute(communicator)
        var = running_variance(batch, local_count=0, convention="unbiased_global")
        return _Estimate(batch.mean, var, batch.count > 0)


class _MeanOfVar:
    def __init__(self, like: Tensor, shared_by: Communicator, /) -> None:
        zeros = torch.zeros_like(as_wide(like))
        self._sums = torch.stack([zeros, zeros])  # of means and of variances
        self._num_batches = zeros.new_zeros(())
        self._shared_by = shared_by

    def update(self, moments: Moments, /) -> None:
        # In the place of a forward pass, which on another rank may be one that is refused.
        batch = aggregate(moments, during(self._shared_by, "forward", moments.mean.dtype))
        var = running_variance(batch, local_count=0, convention="unbiased_global")
        occupied = (moments.count > 0).to(self._sums.dtype)
        self._sums += occupied * torch.stack([batch.mean, var])
        self._num_batches += occupied

    def compute(self, communicator: Communicator, /) -> _Estimate:
        packed = communicator.allreduce(torch.cat([self._sums.flatten(), self._num_batches[None]]))
        mean, var = (packed[:-1] / packed[-1].clamp(min=1)).chunk(2)
        return _Estimate(mean, var, packed[-1] > 0)


class _Layer:
    """A batch norm in training mode: what it is shown, and where its running statistics are.

    `keepers` are the modules with the running statistics: the layer itself, or the two parts of a
    sub-batch norm, or none.
    """

    def __init__(
        self, name: str, module: nn.Module, keepers: Sequence[_BatchNorm], estimator: Estimator
    ) -> None:
        self.name = name or type(module).__name__
        self.module = module
        self.num_features = keepers[0].num_features
        # Without running statistics it is watched all the same: it may communicate in training.
        self.keepers = [keeper for keeper in keepers if keeper.running_mean is not None]
        like = next((k.running_mean for k in self.keepers), None)
        like = torch.zeros(self.num_features) if like is None else like
        self.estimate: _Estimating = (
            _Population(like) if estimator == "population" else _MeanOfVar(like, self.communicator)
        )

    @property
    def communicator(self) -> Communicator:
        """Who shares the layer's batch statistics, as the layer itself asks them."""
        if isinstance(self.module, Synchronized):
            return self.module._communicator
        if isinstance(self.module, nn.SyncBatchNorm):
            return as_communicator(self.module.process_group)
        return SingleProcess()

    @contextmanager
    def watched(self, visits: list[tuple[nn.Module, Tensor]]) -> Iterator[None]:
        """Note the moments of each input, and in `visits` an empty batch shaped like it."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Any = next(iter((*args, *kwargs.values())), None)
            if not self._fits(x):
                return  # the layer will say so, and tell the other ranks
            visits.append((module, x.new_empty((0, *x.shape[1:]))))
            if self.keepers:
                with torch.autocast(x.device.type, enabled=False):
                    self.estimate.update(local_moments(x.detach()))

        handle = self.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _fits(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.ndim > 1
            and x.shape[1] == self.num_features
        )

    def write(self, new: _Estimate) -> None:
        """Keep `new`; each split of a sub-batch norm is given the whole batch's statistics."""
        for keeper in self.keepers:
            num_splits = keeper.num_features // self.num_features
            for running, value in (
                (keeper.running_mean, new.mean),
                (keeper.running_var, new.var),
            ):
                assert running is not None
                running.copy_(value.repeat(num_splits))


def _layers_in_training(model: nn.Module, estimator: Estimator) -> Iterator[_Layer]:
    parts: set[Any] = set()
    module: Any
    for name, module in model.named_modules():
        if _is_sub_batch_norm(module):
            keepers = [module.bn, module.split_bn]
            parts.update(keepers)
            # `split_bn` is what loops that freeze batch norms find.
            if module.training and module.split_bn.training:
                yield _Layer(name, module, keepers, estimator)
        elif isinstance(module, _BatchNorm) and module.training and module not in parts:
            yield _Layer(name, module, [module], estimator)


def _is_sub_batch_norm(module: Any) -> bool:
    """Also SlowFast's own: known by its parts, of which only one sees data in training."""
    return (
        isinstance(getattr(module, "bn", None), _BatchNorm)
        and isinstance(getattr(module, "split_bn", None), _BatchNorm)
        and hasattr(module, "aggregate_stats")
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


_END = object()


def _run_batches(
    model: nn.Module,
    data_loader: Iterable[Any],
    forward_fn: Callable[[Any, Any], object],
    communicator: Communicator,
    layers: Sequence[_Layer],
    visits: list[tuple[nn.Module, Tensor]],
    *,
    num_samples: int | None,
    num_iters: int | None,
    advance: Callable[[], object],
) -> str:
    """Run the model on the ranks' batches in step; what was missing at the end, in words."""
    rank, size = communicator.rank, communicator.size
    steps = samples = own = 0
    iterator: Iterator[Any] | None = None
    batch: Any = None
    while steps != num_iters and (num_samples is None or samples < num_samples):
        new_samples, error = 0, None
        try:
            if batch is not _END:
                iterator = iter(data_loader) if iterator is None else iterator
                batch = next(iterator, _END)
            if num_samples is not None and batch is not _END:
                new_samples = _batch_size(batch)
        except Exception as e:
            error = e
        # Ranks whose loaders raised, ranks that have a batch, and the samples of all of them.
        state = torch.zeros(2 * size + 1, dtype=torch.float64)
        state[rank] = error is not None
        state[size + rank] = batch is not _END
        state[-1] = new_samples
        state = communicator.allreduce(state)
        failed, occupied = state[:-1].bool().chunk(2)
        if error is not None:
            raise error
        if failed.any():
            raise RuntimeError(
                f"rank {rank} cannot go on: `data_loader` raised on rank(s) "
                f"{failed.nonzero().flatten().tolist()} of {size}. The error raised there says why."
            )
        if not occupied.any():
            break
        if steps == 0 and not occupied.all():
            _require_local(layers, occupied)
        last_pass = visits.copy()
        visits.clear()
        if batch is not _END:
            forward_fn(model, batch)
            own += 1
        else:
            # The others' synchronized layers wait for this rank, in the order of the last pass.
            for module, empty in last_pass:
                module(empty)
        steps += 1
        samples += int(state[-1])
        advance()
    if steps == 0:
        raise ValueError(
            f"`data_loader` must give at least one batch: got none on any of {size} rank(s). An "
            "iterator can be used once only; pass what it was made from."
        )
    if num_iters is not None and own < num_iters and batch is _END:
        return f"`num_iters` is {num_iters}: `data_loader` ended after {own} on rank {rank}."
    if num_samples is not None and samples < num_samples and steps != num_iters:
        return f"`num_samples` is {num_samples}: `data_loader` ended after {samples} on all ranks."
    return ""


def _require_local(layers: Sequence[_Layer], occupied: Tensor) -> None:
    """Raise if a rank without any batch would be missed by a synchronized layer.

    Which layers there are to take part in, and in which order, shows in a first pass only.
    """
    if any(layer.communicator.size > 1 for layer in layers):
        raise ValueError(
            "`data_loader` must give at least one batch on every rank of a model with synchronized "
            f"layers: got none on rank(s) {(~occupied).nonzero().flatten().tolist()} of "
            f"{len(occupied)}. Share the data among fewer ranks, or freeze the layers with eval()."
        )


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


@contextmanager
def _progress(
    show: bool, data_loader: Iterable[Any], num_samples: int | None, num_iters: int | None
) -> Iterator[Callable[[], object]]:
    """What to call after each batch."""
    if not show or find_spec("tqdm") is None:
        yield lambda: None
        return
    from tqdm import tqdm

    known = [n for n in (num_iters, length_hint(data_loader)) if n]
    total = min(known) if known and num_samples is None else None
    with tqdm(total=total, desc="precise batch norm", unit="batch") as bar:
        yield bar.update
