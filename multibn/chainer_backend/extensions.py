"""Moving averages from whole passes over data: fine-tuning of batch normalization links.

Chainer's fine-tuning averages the variances of batches: it leaves out the variance between batches
and gives small batches the weight of large ones. Here the population is exact.
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
from multibn.communicators import Communicator, CommunicatorLike, SingleProcess, as_communicator
from multibn.engine.precise import Population, PopulationRun, input_of, length_of


class FinetunePopulationStatistics(training.Extension):
    """Replaces the moving averages of a model's batch normalization by statistics of all data.

    An extension of a trainer, by default once an epoch, before evaluators and snapshots; a call
    does the same without a trainer. The model runs forward on the batches in training mode, without
    gradients, so that deeper links get the same inputs as in training, and multi-node links share
    their statistics. Only `avg_mean`, `avg_var` and `N` of batch normalization links change: other
    persistent values, `chainer.config`, reports and NumPy's random state are as before. After an
    exception or a KeyboardInterrupt everything is as before.

    A call is collective: every rank of `comm` must make it, with the same arguments but for the
    data. Each batch has one small allreduce, and each link of C channels one of 2C+2 numbers at the
    end. Iterators may differ in length: a rank without data left takes part in multi-node links
    with empty batches.

    Parameters
    ----------
    iterator
        A Chainer iterator with `repeat=False`, or any iterable of batches: this rank's data.
    target
        The model, as an Evaluator's. All its batch normalization links change, multi-node or not.
    comm
        The ranks whose data is pooled, as in `check_sync`. They should include the ranks of all
        multi-node links of the model.
    converter
        Makes arrays of a batch, `converter(batch, device)`; None if batches are arrays already.
    device
        The device for `converter`; default: that of `target`.
    eval_func
        Called as `eval_func(*arrays)` for a tuple, `eval_func(**arrays)` for a dict; default:
        `target`.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    TypeError
        If `comm` is no communicator.
    ValueError
        If `iterator` never ends. By a call, if `target` has no batch normalization link or one
        without a size so far; for `comm` as `check_sync`. On all ranks, if no rank has a batch, or
        if a rank has none and there are multi-node links; OneValueError, if a multi-node link gets
        one value per channel, as of a last batch of one sample: let the iterator drop that batch.
    RuntimeError
        By a call, on the other ranks, if one rank's iterator or converter raised.

    Warns
    -----
    UserWarning
        For links of `target` with moving averages that are no L.BatchNormalization: their paths.

    Notes
    -----
    `avg_mean` and `avg_var` become mean and variance of all elements of the link's inputs on all
    ranks, for batches of any sizes. The variance is unbiased, times N/(N-1) with N these elements
    per channel, whatever the link's `avg_var` convention is. The link's `N` becomes the number of
    its calls on this rank. A link without input keeps its values, and so does one that the forward
    pass calls with `chainer.config.train` False.

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
    priority = training.extension.PRIORITY_WRITER + 2  # AllreducePersistent's is one less

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
        if rest := find_unsupported_norms(target):
            message = list_obstacles(rest, "link(s) of `target` are not updated")
            warn(message)
        self._iterator, self._target, self._comm = iterator, target, comm
        self._converter, self._device, self._progress = converter, device, progress
        self._function: Any = target if eval_func is None else eval_func

    def __call__(self, trainer: Any = None) -> None:
        norms = _norms(self._target)
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
    """A batch normalization link, with the population of its inputs."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.estimator = Population(link.avg_mean)
        self.num_calls = 0
        is_multi_node = isinstance(link, MultiNodeBatchNormalization)
        self.communicator: Communicator = (
            link.layer_communicator if is_multi_node else SingleProcess()
        )

    def count(self) -> None:
        self.num_calls += 1

    def write(self, mean: Any, var: Any, /) -> None:
        self.link.avg_mean[...] = mean
        self.link.avg_var[...] = var
        self.link.N = self.num_calls


def _norms(target: chainer.Link) -> list[_Norm]:
    kinds = MultiNodeBatchNormalization, L.BatchNormalization
    links: list[Any] = [link for link in target.links() if isinstance(link, kinds)]
    if not links:
        raise ValueError("`target` must have a batch normalization link: got none.")
    check_sizes("target", links)
    return [_Norm(link) for link in links]


class _Watch(chainer.LinkHook):
    """Notes the links' calls in a pass, and adds the inputs of Chainer's own links."""

    name = "FinetunePopulationStatistics"

    def __init__(self, norms: Sequence[_Norm], run: PopulationRun) -> None:
        super().__init__()
        self._norms = {id(norm.link): norm for norm in norms}
        self._run = run

    def forward_preprocess(self, args: Any) -> None:
        norm = self._norms.get(id(args.link))
        if norm is None or not chainer.config.train:
            return
        x = input_of(args.args, args.kwargs)
        layout = norm.link.avg_mean.shape, norm.link.axis
        try:
            axis, _ = functions.check_input(x, *layout, SingleProcess())
        except (TypeError, ValueError):
            return  # the link will raise, and tell the other ranks
        x = chainer.as_array(x)
        norm.count()
        self._run.repeat(norm.count)
        if isinstance(norm.link, L.BatchNormalization):
            norm.estimator.add(norm.estimator.sums_of(x, axis=axis))


@contextmanager
def _unchanged(target: chainer.Link, function: Any) -> Iterator[None]:
    """Restore persistent values, arrays in place, and NumPy's random state; drop reports."""
    persistent = [
        (link, name, value, copy.deepcopy(value))
        for link in target.links()
        for name in sorted(link._persistent)
        if (value := link.__dict__[name]) is not None
    ]
    in_steps = {k: step_accumulators.pop(k) for k in target.links() if k in step_accumulators}
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
        step_accumulators.update(in_steps)
        for link, name, value, before in persistent:
            link.__dict__[name] = value
            if isinstance(value, chainer.get_array_types()):
                value[...] = before
