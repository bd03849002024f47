"""Moving averages from whole passes over data: fine-tuning of batch normalization links.

Chainer's fine-tuning averages the variances of batches, which leaves out the variance between them
and weighs small batches as much as large ones. Here the population is exact.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from typing import Any

import chainer
import numpy as np
from chainer import links as L
from chainer import training
from chainer.dataset import concat_examples

from multibn import lockstep
from multibn._progress import progress as show_progress
from multibn.chainer_backend import functions
from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.chainer_backend.participants import participants
from multibn.communicators import Communicator, SingleProcess
from multibn.population import PopulationEstimator, running_variance
from multibn.statistics import local_moments


class FinetunePopulationStatistics(training.Extension):
    """Trainer extension that runs `finetune_population_statistics`.

    Called once an epoch by default, before evaluators and snapshots. Its parameters are those of
    `finetune_population_statistics`. Collective: the trainer of every rank must have it.
    """

    trigger = 1, "epoch"
    priority = training.extension.PRIORITY_WRITER + 2  # AllreducePersistent's is one less

    def __init__(
        self, iterator: Any, target: chainer.Link, comm: Any = None, **options: Any
    ) -> None:
        self._arguments = iterator, target, comm
        self._options = options

    def __call__(self, trainer: Any = None) -> None:
        finetune_population_statistics(*self._arguments, **self._options)


def finetune_population_statistics(
    iterator: Any,
    target: chainer.Link,
    comm: Any = None,
    *,
    num_passes: int = 1,
    converter: Callable[..., Any] | None = concat_examples,
    device: Any = None,
    eval_func: Callable[..., object] | None = None,
    progress: bool = True,
) -> None:
    """Replace the moving averages of a model's batch normalization by statistics of all data.

    The model runs forward on the batches in training mode, without gradients, so that deeper links
    see what they see in training; multi-node links go on sharing their statistics. Nothing but
    `avg_mean`, `avg_var` and `N` of batch normalization links is changed: other persistent values,
    `chainer.config`, reports and NumPy's random state are as before, and after an exception, or a
    KeyboardInterrupt, everything is.

    Collective: every rank of `comm` must call it, with the same arguments but for the data. Ranks
    proceed batch by batch together (one small allreduce each), so iterators may differ in length; a
    rank that has run out takes part in the others' multi-node links with empty batches. At the end
    there is one allreduce of 2C+2 numbers for each link of C channels.

    Parameters
    ----------
    iterator
        A Chainer iterator with `repeat=False`, or any iterable of batches: this rank's data.
    target
        The model, as an Evaluator's. Its batch normalization links, multi-node or not, are those
        that are changed.
    comm
        The ranks whose data is pooled, anything that `multibn.as_communicator` takes. It should
        contain the communicators of all multi-node links of the model. Default: the largest of
        them.
    num_passes
        How often to go through the data; more than once is of use where it is augmented.
    converter
        Makes arrays of a batch, `converter(batch, device)`; None if batches are arrays already.
    device
        Where to; default: that of `target`.
    eval_func
        What is called with the arrays, those of a tuple or a dict as its arguments; default
        `target`.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    ValueError
        If `num_passes` is not positive, `iterator` repeats for ever, or `target` has no batch
        normalization link or one that has no size yet. On all ranks, if no rank has a batch, or if
        a rank has none and there are multi-node links. If `comm` is None and a launcher started
        several processes, but the model's links tell of none other than this one.
    RuntimeError
        On the other ranks, if one rank's iterator or converter raised.

    Notes
    -----
    `avg_mean` and `avg_var` become mean and variance of all elements that the link was shown on all
    ranks, in batches of any size. The variance is unbiased, times N/(N-1) with N the number of
    those elements per channel, whatever the link's `avg_var` convention is. The link's `N` becomes
    the number of its calls since `start_finetuning`, on one rank. A link that was shown nothing
    keeps what it has.
    """
    if num_passes < 1:
        raise ValueError(f"`num_passes` must be positive: got {num_passes}.")
    if getattr(iterator, "repeat", False):
        raise ValueError(
            "`iterator` must end after one pass: got one that repeats. Make it with repeat=False."
        )
    norms = _norms(target)
    communicator = participants(target, comm)
    device = target.device if device is None else device

    def convert(batch: Any) -> Any:
        return batch if converter is None else converter(batch, device)

    def call(arrays: Any) -> None:
        function: Any = target if eval_func is None else eval_func
        if isinstance(arrays, tuple):
            function(*arrays)
        elif isinstance(arrays, dict):
            function(**arrays)
        else:
            function(arrays)

    watch = _Watch(norms)
    with (
        _unchanged(target, eval_func),
        chainer.using_config("train", True),
        chainer.no_backprop_mode(),
        watch,
        show_progress(
            progress and communicator.rank == 0, "fine-tuning", _num_batches(iterator, num_passes)
        ) as advance,
    ):
        for norm in norms:
            norm.link.start_finetuning()
        batches = (convert(batch) for _ in range(num_passes) for batch in _one_pass(iterator))
        steps = lockstep.Lockstep(batches, communicator, source="`iterator` or `converter`")
        for _ in lockstep.run(
            steps,
            call,
            watch.visits,
            [norm.communicator for norm in norms],
            source="`iterator`",
            layers="multi-node links",
            otherwise="chainermn.scatter_dataset for example",
        ):
            advance()
        populations = [norm.estimator.compute(communicator) for norm in norms]
    for norm, population in zip(norms, populations, strict=True):
        if bool(population.count > 0):
            link = norm.link
            var = running_variance(population, local_count=0, convention="unbiased_global")
            link.avg_mean[...] = population.mean
            link.avg_var[...] = var
            link.N = norm.num_calls


class _Norm:
    """A batch normalization link, and what it was shown."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.estimator = PopulationEstimator(link.avg_mean)
        self.num_calls = 0

    @property
    def communicator(self) -> Communicator:
        """Who shares the link's batch statistics."""
        if isinstance(self.link, MultiNodeBatchNormalization):
            return self.link._communicator
        return SingleProcess()


def _norms(target: chainer.Link) -> list[_Norm]:
    norms = []
    for name, link in target.namedlinks():
        if not isinstance(link, (MultiNodeBatchNormalization, L.BatchNormalization)):
            continue
        if link.avg_mean is None:
            raise ValueError(
                f"batch normalization links must have a size: got {name} of `target`, which has "
                "seen no input yet. Call the model once before."
            )
        norms.append(_Norm(link))
    if not norms:
        raise ValueError("`target` must have a batch normalization link: got none.")
    return norms


class _Watch(chainer.LinkHook):
    """Notes the moments of what links are shown, and the calls of the latest pass."""

    name = "FinetunePopulationStatistics"

    def __init__(self, norms: Sequence[_Norm]) -> None:
        super().__init__()
        self._norms = {id(norm.link): norm for norm in norms}
        self.visits: list[Callable[[], object]] = []

    def forward_preprocess(self, args: Any) -> None:
        norm = self._norms.get(id(args.link))
        x = next(iter((*args.args, *args.kwargs.values())), None)
        if norm is None:
            return
        channels = norm.link.avg_mean.shape
        axis = functions.fitting_axes(x, channels, norm.link.axis)
        if axis is None:
            return  # the link will say so, and tell the other ranks
        x = chainer.as_array(x)
        norm.estimator.update(local_moments(x, axis=axis))
        norm.num_calls += 1
        shape = tuple(0 if i == axis[0] else n for i, n in enumerate(x.shape))
        empty = chainer.backend.get_array_module(x).empty(shape, x.dtype)
        kwargs = {k: v for k, v in args.kwargs.items() if k == "finetune"}
        self.visits.append(partial(_visit, norm, empty, kwargs))


def _visit(norm: _Norm, empty: Any, kwargs: dict[str, Any]) -> None:
    if norm.communicator.size > 1:
        norm.link(empty, **kwargs)
    else:  # Chainer's own link refuses an empty batch, and nobody waits for this rank
        norm.num_calls += 1


def _one_pass(iterator: Any) -> Iterator[Any]:
    if hasattr(iterator, "reset"):
        iterator.reset()
    return iter(iterator)


@contextmanager
def _unchanged(target: chainer.Link, eval_func: Any) -> Iterator[None]:
    """Put back persistent values, arrays in place, and NumPy's random state; keep reports out."""
    persistent = [
        (link, name, value, copy.deepcopy(value))
        for link in target.links()
        for name in sorted(link._persistent)
        if (value := link.__dict__[name]) is not None
    ]
    random_state = np.random.get_state()  # noqa: NPY002 (Chainer's dropout draws from it)
    reporter = chainer.Reporter()
    for link in (target, eval_func):  # which may be a loss function with the target in it
        if isinstance(link, chainer.Link):
            reporter.add_observers("target", link.namedlinks())
    try:
        with reporter.scope({}):
            yield
    finally:
        np.random.set_state(random_state)  # noqa: NPY002
        for link, name, value, before in persistent:
            link.__dict__[name] = value
            if isinstance(value, chainer.get_array_types()):
                value[...] = before


def _num_batches(iterator: Iterable[Any], num_passes: int) -> int | None:
    if hasattr(iterator, "dataset") and hasattr(iterator, "batch_size"):
        return num_passes * -(-len(iterator.dataset) // iterator.batch_size)
    return num_passes * length_hint(iterator) or None
