"""Compute running statistics from whole passes over data: one loop for all backends."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
from operator import length_hint
from typing import Any, TypeAlias

from multibn._arrays import array_namespace, device, is_on_host
from multibn._typing import Array
from multibn.communicators import Communicator
from multibn.communicators.channel import at
from multibn.communicators.nonfinite import layer_of
from multibn.engine.lockstep import END, Lockstep
from multibn.engine.plan import Plan
from multibn.engine.recompute import StatisticsTape
from multibn.engine.running import PopulationEstimator, running_variance
from multibn.engine.statistics import BatchStatistics, reduced_axes

# New running mean and variance, and whether any rank had data.
Estimate: TypeAlias = tuple[Array, Array, Any]

# Keyword arguments of a layer that are not its input.
_OPTIONS = {"finetune", "residual", "mask", "lengths"}


class Population(PopulationEstimator):
    """Exact mean and unbiased variance of all inputs on all ranks."""

    def estimate(self, communicator: Communicator, /) -> Estimate:
        batch = self.compute(communicator)
        return batch.mean, running_variance(batch, local_count=0), batch.count > 0


class PopulationRun(StatisticsTape):
    """A run of a model without gradients over the batches of all ranks of `communicator`.

    `layers` are all that share statistics or have running statistics: each has a `communicator`, an
    `estimator` such as `Population` or None, and `write(mean, var)`. `keep` collects the inputs of
    multibn's layers; the backends add the inputs of the frameworks' layers. A rank that has run out
    of data repeats the messages of its last batch with empty inputs, so that the other ranks do not
    wait. `title` is the progress bar's; error messages call the source of batches `source`.
    """

    def __init__(
        self, layers: Sequence[Any], communicator: Communicator, *, title: str, source: str
    ) -> None:
        super().__init__()
        self._layers, self._communicator = layers, communicator
        self._title, self._source = title, source
        self._visits: list[Callable[[], object]] = []
        self._tracked = [layer for layer in layers if layer.estimator is not None]
        self._estimates: list[Estimate] = []
        found = [(layer_of(layer.communicator), layer) for layer in self._tracked]
        # The key is the function `options`: a shallow copy of a layer shares everything else.
        self._by_options = {of.options: layer for of, layer in found if of is not None}

    def repeat(self, visit: Callable[[], object]) -> None:
        """Register a function to call in each later step in which this rank has no batch."""
        self._visits.append(visit)

    def keep(self, batch: BatchStatistics, args: Any, plan: Any) -> None:
        """Add the input of a layer's message, unless the layer has skipped the batch."""
        if args is None:  # a recomputed pass, without messages
            return
        communicator = plan.communicator
        if communicator.size > 1:
            shape = tuple(0 if k == args.axis[0] else n for k, n in enumerate(args.x.shape))
            x = array_namespace(args.x).empty(shape, dtype=args.x.dtype, device=device(args.x))
            empty = args._replace(x=x, mask=None, residual=None, running=None)
            again = Plan(empty, communicator, weighting=plan.weighting, **plan.facts)
            self.repeat(partial(again.forward, empty))
        found = layer_of(communicator)
        layer = self._by_options.get(found and found.options)
        if layer is None:
            return
        xp = array_namespace(batch.mean)
        is_skipped = xp.any(xp.isnan(batch.mean))
        # All ranks return here together, as they must: estimators may communicate.
        if is_on_host(batch.mean) and is_skipped:
            return
        channel_axes = [k for k in range(args.x.ndim) if k not in args.axis]
        num_splits = batch.mean.ndim - len(layer.estimator.shape)  # axes of a batch's splits
        axis = reduced_axes(args.x.ndim, channel_axes[num_splits:])
        sums = layer.estimator.sums_of(args.x, axis=axis, mask=args.mask)
        layer.estimator.add(xp.where(is_skipped, xp.zeros_like(sums), sums))

    def run(
        self,
        batches: Iterable[Any],
        forward: Callable[[Any], object],
        *,
        progress: bool,
        total: int | None,
        num_iters: int | None = None,
        num_samples: int | None = None,
        samples_in: Callable[[Any], int] | None = None,
    ) -> str:
        """Run `forward` on each batch, then compute the statistics. Collective.

        Returns a sentence if the batches ended before `num_iters` or `num_samples`; otherwise "".

        Raises ValueError on all ranks if layers are shared and one rank never has a batch: only a
        forward pass shows in which order that rank must visit the layers.
        """
        rank, source = self._communicator.rank, self._source
        is_shared = any(layer.communicator.size > 1 for layer in self._layers)
        steps = Lockstep(
            batches,
            self._communicator,
            source=source,
            place=f"a step of {self._title}",
            size_of=samples_in,
            everywhere=is_shared,
        )
        num_steps = num_batches = samples = 0
        with _progress(progress and rank == 0, self._title, total) as advance:
            for step in islice(steps, num_iters):
                last_pass, self._visits = self._visits, []
                with self:
                    if step.batch is not END:
                        forward(step.batch)
                    else:
                        for visit in last_pass:
                            visit()
                        self._visits = last_pass
                num_steps += 1
                num_batches += step.batch is not END
                samples += step.total_size
                advance()
                if num_samples is not None and samples >= num_samples:
                    break
            named = at(self._communicator, self._title)
            self._estimates = [v.estimator.estimate(named) for v in self._tracked]
        enough = num_samples is not None and samples >= num_samples
        ended = ""
        if num_iters is not None and num_batches < (num_steps if enough else num_iters):
            ended = f"`num_iters` is {num_iters}: {source} ended after {num_batches} on rank {rank}"
        elif num_samples is not None and not enough and num_steps != num_iters:
            ended = f"`num_samples` is {num_samples}: {source} ended after {samples} on all ranks"
        return f"{ended}. All batches that were available were used." if ended else ""

    def write(self) -> Iterator[tuple[Any, bool]]:
        """Write the statistics. Yields each layer that has any, and whether a rank had data."""
        for layer, (mean, var, any_data) in zip(self._tracked, self._estimates, strict=True):
            if any_data:
                layer.write(mean, var)
            yield layer, bool(any_data)


def length_of(batches: Any, /) -> int:
    """Return the number of batches, for a progress bar only; 0 if `batches` has no length."""
    with suppress(Exception):  # a failing `__len__` does not mean that the batches are bad
        return length_hint(batches)
    return 0


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any], /) -> Any:
    """Return the input among a layer's arguments; it may be passed by keyword, after options."""
    named = [v for name, v in kwargs.items() if name not in _OPTIONS]
    return next(iter((*args, *named)), None)


@contextmanager
def _progress(show: bool, description: str, total: int | None) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each batch; it advances a bar if `show` and tqdm is there."""
    if show and find_spec("tqdm") is not None:
        from tqdm import tqdm

        with tqdm(total=total, desc=description, unit="batch") as bar:
            yield bar.update
    else:
        yield lambda: None
