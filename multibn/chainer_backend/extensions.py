"""Moving averages from whole passes over data: fine-tuning of batch normalization links.

Chainer's fine-tuning averages the variances of batches, ignores the variance between batches, and
gives small batches the weight of large ones. This extension computes exact population statistics.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np
from chainer import links as L
from chainer import training
from chainer.dataset import concat_examples

from multibn._typing import check_bool, list_obstacles
from multibn._warnings import warn
from multibn.chainer_backend import functions
from multibn.chainer_backend.check_sync import participants
from multibn.chainer_backend.convert import check_sizes, find_unsupported_norms
from multibn.chainer_backend.links import MultiNodeBatchNormalization, check_link, step_accumulators
from multibn.communicators import CommunicatorLike, SingleProcess, as_communicator
from multibn.engine.plan import NormArgs
from multibn.engine.precise import Population, PopulationRun, input_of, length_of


class FinetunePopulationStatistics(training.Extension):
    """Replace the moving averages of a model's batch normalization by statistics of all data.

    A trainer runs this extension once per epoch by default, before evaluators and snapshots.
    Without a trainer, call the extension. The model runs forward on the batches in training mode,
    without gradients: deeper links get the same inputs as in training, and multi-node links share
    statistics. Only `avg_mean`, `avg_var` and `N` of batch normalization links change: other
    persistent values, `chainer.config`, reports and NumPy's random state are restored. After an
    exception or a KeyboardInterrupt, everything is restored.

    A call is collective: every rank of `comm` must make it, with the same arguments except for the
    data. Each batch has one small allreduce. At the end, each link of C channels has one of 2C+2
    numbers. Iterators may differ in length: a rank that has run out of data calls multi-node links
    with empty batches.

    Parameters
    ----------
    iterator
        A Chainer iterator with `repeat=False`, or any iterable of batches: this rank's data.
    target
        The model, as for an Evaluator. All batch normalization links change, multi-node or not.
    comm
        The ranks whose data is pooled, as in `check_sync`. They should include the ranks of all
        multi-node links of the model.
    converter
        Called as `converter(batch, device)` to make arrays of a batch; None if batches are arrays.
    device
        The device for `converter`; default: the device of `target`.
    eval_func
        Called as `eval_func(*arrays)` for a tuple, `eval_func(**arrays)` for a dict; default:
        `target`.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    TypeError
        If `comm` is not a communicator, `target` not a chainer.Link, or `progress` not a bool.
    ValueError
        If `iterator` repeats. In a call: if `target` has no batch normalization link, or one whose
        size is not known yet; for `comm`, as `check_sync`. On all ranks: if no rank has a batch, or
        if a rank has none and there are multi-node links. OneValueError if a multi-node link gets
        one value per channel, for example from a last batch of one sample: drop that batch.
    RuntimeError
        In a call, on the other ranks, if one rank's iterator or converter raises.

    Warns
    -----
    UserWarning
        Lists the links of `target` that have moving averages but are not L.BatchNormalization.

    Notes
    -----
    `avg_mean` and `avg_var` become the mean and variance of all elements of the link's inputs, over
    all batches and ranks, for batches of any sizes. The variance is unbiased (divided by the number
    of elements per channel minus 1), whatever the link's `avg_var` option. The link's `N` becomes
    the number of its calls on this rank. A link keeps its values if it gets no input while
    `chainer.config.train` is True.

    Examples
    --------
    >>> import numpy as np
    >>> from chainer import links
    >>> from multibn.chainer import FinetunePopulationStatistics
    >>> link = links.BatchNormalization(1)
    >>> batches = [np.asarray([[1], [3]], "f"), np.asarray([[5], [7], [9]], "f")]
    >>> extension = FinetunePopulationStatistics(batches, link, converter=None, progress=False)
    >>> extension()  # or, once in each epoch: trainer.extend(extension)
    >>> print(link.avg_mean, link.avg_var, link.N)
    [5.] [10.] 2
    """

    trigger = 1, "epoch"
    priority = training.extension.PRIORITY_WRITER + 2  # just before AllreducePersistent

    def __init__(
        self,
        iterator: Any,
        target: chainer.Link,
        comm: CommunicatorLike = None,
        *,
        converter: Callable[..., Any] | None = concat_examples,
        device: Any = None,
        eval_func: Callable[..., object] | None = None,
        progress: bool = True,
    ) -> None:
        if getattr(iterator, "repeat", False):
            raise ValueError(
                "`iterator` must end after one pass: got one that repeats. Make it with "
                "repeat=False."
            )
        check_link("target", target)
        check_bool(progress=progress)
        if comm is not None:
            as_communicator(comm)
        rest = find_unsupported_norms(target)
        warn(list_obstacles(rest, "link(s) of `target` are not updated"))
        self._iterator, self._target, self._comm = iterator, target, comm
        self._converter, self._device, self._progress = converter, device, progress
        self._function: Any = target if eval_func is None else eval_func

    def __call__(self, trainer: Any = None) -> None:
        kinds = MultiNodeBatchNormalization, L.BatchNormalization
        links = [link for link in self._target.links() if isinstance(link, kinds)]
        if not links:
            raise ValueError(
                "`target` must have a batch normalization link: got none. Pass the whole model."
            )
        check_sizes("target", links)
        norms = [_Norm(link) for link in links]
        world, source = participants(self._target, self._comm), "`iterator` or `converter`"
        run = PopulationRun(norms, world, title="fine-tuning", source=source)
        with (
            _unchanged(self._target, self._function),
            chainer.using_config("train", True),
            chainer.no_backprop_mode(),
            _Watch(norms, run),
        ):
            for norm in norms:
                norm.link.start_finetuning()
            total = length_of(self._iterator) or None
            run.run(self._batches(), self._forward, progress=self._progress, total=total)
        list(run.write())

    def _batches(self) -> Iterator[Any]:
        if hasattr(self._iterator, "reset"):
            self._iterator.reset()
        device = self._target.device if self._device is None else self._device
        for batch in self._iterator:
            yield batch if self._converter is None else self._converter(batch, device)

    def _forward(self, arrays: Any) -> None:
        if isinstance(arrays, dict):
            self._function(**arrays)
        else:
            self._function(*arrays if isinstance(arrays, tuple) else [arrays])


class _Norm:
    """A batch normalization link, with its estimator and its number of calls."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.estimator = Population(link.avg_mean)
        self.num_calls = 0
        is_multi_node = isinstance(link, MultiNodeBatchNormalization)
        self.communicator: Any = link.layer_communicator if is_multi_node else SingleProcess()

    def count(self) -> None:
        self.num_calls += 1

    def write(self, mean: Any, var: Any, /) -> None:
        self.link.avg_mean[...] = mean
        self.link.avg_var[...] = var
        self.link.N = self.num_calls


class _Watch(chainer.LinkHook):
    """Count the links' calls, and add the inputs of Chainer's own links to the estimators."""

    name = "FinetunePopulationStatistics"

    def __init__(self, norms: Sequence[_Norm], run: PopulationRun) -> None:
        super().__init__()
        self._norms = {id(norm.link): norm for norm in norms}
        self._run = run

    def forward_preprocess(self, args: Any) -> None:
        norm = self._norms.get(id(args.link))
        if norm is None or not chainer.config.train:
            return
        call = NormArgs(input_of(args.args, args.kwargs), None, None, 0.0, norm.link.axis)
        try:
            call = functions.checked(call, norm.link.avg_mean.shape, SingleProcess())
        except (TypeError, ValueError):
            return  # the link will raise, and make the other ranks raise
        norm.count()
        self._run.repeat(norm.count)
        if isinstance(norm.link, L.BatchNormalization):
            x = chainer.as_array(call.x)
            norm.estimator.add(norm.estimator.sums_of(x, axis=call.axis))


@contextmanager
def _unchanged(target: chainer.Link, function: Any) -> Iterator[None]:
    """Restore persistent values and NumPy's random state at exit, and drop reports."""
    persistent = [
        (link, name, value, copy.deepcopy(value))
        for link in target.links()
        for name in sorted(link._persistent)
        if (value := link.__dict__[name]) is not None
    ]
    accumulators = {k: step_accumulators.pop(k) for k in target.links() if k in step_accumulators}
    random_state = np.random.get_state()  # noqa: NPY002 (Chainer's dropout uses this state)
    reporter = chainer.Reporter()
    for link in (target, function):  # the function may be a chain that contains the target
        if isinstance(link, chainer.Link):
            reporter.add_observers("target", link.namedlinks())
    try:
        with reporter.scope({}):
            yield
    finally:
        np.random.set_state(random_state)  # noqa: NPY002
        step_accumulators.update(accumulators)
        for link, name, value, before in persistent:
            link.__dict__[name] = value
            if isinstance(value, chainer.get_array_types()):
                value[...] = before
