"""Moving averages from whole passes over data: fine-tuning of batch normalization links.

Chainer's fine-tuning averages the variances of batches: it leaves out the variance between batches
and gives small batches the weight of large ones. Here the population is exact.
"""

import copy
import inspect
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

from multibn._typing import check_int
from multibn.chainer_backend import functions
from multibn.chainer_backend.links import MultiNodeBatchNormalization, steps
from multibn.chainer_backend.synchrony import participants
from multibn.communicators import Communicator, CommunicatorLike, SingleProcess, as_communicator
from multibn.engine.precise import Pass, Population, Words, input_of

_WORDS = Words(
    title="fine-tuning",
    source="`iterator`",
    readers="`iterator` or `converter`",
    layers="multi-node links",
    otherwise="chainermn.scatter_dataset for example",
)


class FinetunePopulationStatistics(training.Extension):
    """Trainer extension that runs `finetune_population_statistics`.

    Runs once an epoch by default, before evaluators and snapshots. Its parameters are those of
    `finetune_population_statistics`, and are checked when the extension is built. Collective: the
    trainer of every rank must have it.

    Examples
    --------
    >>> import numpy as np
    >>> from chainer import iterators, links, optimizers, training
    >>> from multibn.chainer_backend import FinetunePopulationStatistics
    >>> data = np.asarray([[1], [3], [5], [7]], "f")
    >>> link = links.BatchNormalization(1)
    >>> optimizer = optimizers.SGD().setup(link)
    >>> updater = training.StandardUpdater(iterators.SerialIterator(data, 2), optimizer)
    >>> trainer = training.Trainer(updater, (10, "epoch"))
    >>> once = iterators.SerialIterator(data, 2, repeat=False)
    >>> extension = FinetunePopulationStatistics(once, link, progress=False)
    >>> trainer.extend(extension)  # after each epoch, before evaluators and snapshots
    >>> extension(trainer)
    >>> print(link.avg_mean)
    [4.]
    """

    trigger = 1, "epoch"
    priority = training.extension.PRIORITY_WRITER + 2  # AllreducePersistent's is one less

    def __init__(
        self, iterator: Any, target: chainer.Link, comm: CommunicatorLike = None, **options: Any
    ) -> None:
        signature = inspect.signature(finetune_population_statistics)
        self._arguments = signature.bind(iterator, target, comm, **options)
        _check_arguments(iterator, comm, options.get("num_passes", 1))

    def __call__(self, trainer: Any = None) -> None:
        finetune_population_statistics(*self._arguments.args, **self._arguments.kwargs)


def finetune_population_statistics(
    iterator: Any,
    target: chainer.Link,
    comm: CommunicatorLike = None,
    *,
    num_passes: int = 1,
    converter: Callable[..., Any] | None = concat_examples,
    device: Any = None,
    eval_func: Callable[..., object] | None = None,
    progress: bool = True,
) -> None:
    """Replace the moving averages of a model's batch normalization by statistics of all data.

    The model runs forward on the batches in training mode, without gradients, so that deeper links
    get the same inputs as in training, and multi-node links share their statistics. Only
    `avg_mean`, `avg_var` and `N` of batch normalization links change: other persistent values,
    `chainer.config`, reports and NumPy's random state are as before. After an exception or a
    KeyboardInterrupt everything is as before.

    Collective: every rank of `comm` must call it, with the same arguments but for the data. Each
    batch has one small allreduce, and each link of C channels one of 2C+2 numbers at the end.
    Iterators may differ in length: a rank without data left takes part in multi-node links with
    empty batches.

    Parameters
    ----------
    iterator
        A Chainer iterator with `repeat=False`, or any iterable of batches: this rank's data.
    target
        The model, as an Evaluator's. All its batch normalization links change, multi-node or not.
    comm
        The ranks whose data is pooled, as in `check_sync`. They should include the ranks of all
        multi-node links of the model.
    num_passes
        Number of passes over the data; more than one is useful for augmented data.
    converter
        Makes arrays of a batch, `converter(batch, device)`; None if batches are arrays already.
    device
        The device for `converter`; default: that of `target`.
    eval_func
        Called with the arrays, the items of a tuple or dict as its arguments; default: `target`.
    progress
        Show a progress bar on rank 0, if tqdm is installed.

    Raises
    ------
    TypeError
        If `num_passes` is no int, or `comm` no communicator.
    ValueError
        If `num_passes` is not positive, `iterator` never ends or cannot begin again for them, or
        `target` has no batch normalization link or one without a size so far; for `comm` as
        `check_sync`. On all ranks, if no rank has a batch, or if a rank has none and there are
        multi-node links.
    RuntimeError
        On the other ranks, if one rank's iterator or converter raised.

    Notes
    -----
    `avg_mean` and `avg_var` become mean and variance of all elements of the link's inputs on all
    ranks, for batches of any sizes. The variance is unbiased, times N/(N-1) with N these elements
    per channel, whatever the link's `avg_var` convention is. The link's `N` becomes the number of
    its calls on this rank. A link without input keeps its values.

    Examples
    --------
    >>> import numpy as np
    >>> from chainer import links
    >>> from multibn.chainer_backend import finetune_population_statistics
    >>> link = links.BatchNormalization(1)
    >>> batches = [np.asarray([[1], [3]], "f"), np.asarray([[5], [7], [9]], "f")]
    >>> finetune_population_statistics(batches, link, converter=None, progress=False)
    >>> print(link.avg_mean, link.avg_var, link.N)
    [5.] [10.] 2
    """
    _check_arguments(iterator, comm, num_passes)
    norms = _norms(target)
    communicator = participants(target, comm)
    device = target.device if device is None else device

    def batches() -> Iterator[Any]:
        for _ in range(num_passes):
            if hasattr(iterator, "reset"):
                iterator.reset()
            for batch in iterator:
                yield batch if converter is None else converter(batch, device)

    def call(arrays: Any) -> None:
        function: Any = target if eval_func is None else eval_func
        if isinstance(arrays, tuple):
            function(*arrays)
        elif isinstance(arrays, dict):
            function(**arrays)
        else:
            function(arrays)

    run = Pass(norms, communicator, _WORDS)
    with (
        _unchanged(target, eval_func),
        chainer.using_config("train", True),
        chainer.no_backprop_mode(),
        _Watch(norms, run),
    ):
        for norm in norms:
            norm.link.start_finetuning()
        total = _num_batches(iterator, num_passes)
        run.run(batches(), call, progress=progress, total=total)
    list(run.write())


def _check_arguments(iterator: Any, comm: CommunicatorLike, num_passes: int) -> None:
    check_int("num_passes", num_passes)
    if getattr(iterator, "repeat", False):
        raise ValueError(
            "`iterator` must end after one pass: got one that repeats. Make it with repeat=False."
        )
    if num_passes > 1 and isinstance(iterator, Iterator) and not hasattr(iterator, "reset"):
        raise ValueError(
            "`iterator` must be iterable once more for each of `num_passes`: got "
            f"{type(iterator).__qualname__}, which has no reset(). Pass a list or a Chainer "
            "iterator."
        )
    if comm is not None:
        as_communicator(comm)


class _Norm:
    """A batch normalization link, with the population of its inputs."""

    own_forward = False

    def __init__(self, link: Any) -> None:
        self.link = link
        self.estimator = Population(link.avg_mean)
        self.num_calls = 0
        is_multi_node = isinstance(link, MultiNodeBatchNormalization)
        self.communicator: Communicator = link.conversation if is_multi_node else SingleProcess()

    def visit(self, empty: Any, kwargs: Any) -> None:
        if self.communicator.size > 1:
            self.link(empty, **kwargs)
        else:  # no other rank waits, and Chainer's own link refuses an empty batch
            self.num_calls += 1

    def write(self, mean: Any, var: Any, /) -> None:
        self.link.avg_mean[...] = mean
        self.link.avg_var[...] = var
        self.link.N = self.num_calls


def _norms(target: chainer.Link) -> list[_Norm]:
    links = [
        (name, link)
        for name, link in target.namedlinks()
        if isinstance(link, (MultiNodeBatchNormalization, L.BatchNormalization))
    ]
    for name, link in links:
        if link.avg_mean is None:
            raise ValueError(
                f"batch normalization links must have a size: got {name} of `target`, which has "
                "seen no input yet. Call the model once before."
            )
    if not links:
        raise ValueError("`target` must have a batch normalization link: got none.")
    return [_Norm(link) for _, link in links]


class _Watch(chainer.LinkHook):
    """Shows the links' inputs to a pass."""

    name = "FinetunePopulationStatistics"

    def __init__(self, norms: Sequence[_Norm], run: Pass) -> None:
        super().__init__()
        self._norms = {id(norm.link): norm for norm in norms}
        self._run = run

    def forward_preprocess(self, args: Any) -> None:
        norm = self._norms.get(id(args.link))
        if norm is None:
            return
        x = functions.standard_layout(input_of(args.args, args.kwargs))
        layout = norm.link.avg_mean.shape, norm.link.axis
        elements = {name: args.kwargs.get(name) for name in ("mask", "lengths")}
        try:
            axis, mask = functions.check_input(x, *layout, SingleProcess(), **elements)
        except (TypeError, ValueError):
            return  # the link will raise, and tell the other ranks
        x = chainer.as_array(x)
        norm.num_calls += 1
        shape = tuple(0 if i == axis[0] else n for i, n in enumerate(x.shape))
        empty = chainer.backend.get_array_module(x).empty(shape, x.dtype)
        kwargs = {k: v for k, v in args.kwargs.items() if k == "finetune"}
        self._run.repeat(partial(norm.visit, empty, kwargs))
        self._run.show(norm, x, axis, mask)


@contextmanager
def _unchanged(target: chainer.Link, eval_func: Any) -> Iterator[None]:
    """Restore persistent values, arrays in place, and NumPy's random state; drop reports."""
    persistent = [
        (link, name, value, copy.deepcopy(value))
        for link in target.links()
        for name in sorted(link._persistent)
        if (value := link.__dict__[name]) is not None
    ]
    in_steps = {link: steps.pop(link) for link in target.links() if link in steps}
    random_state = np.random.get_state()  # noqa: NPY002 (Chainer's dropout uses this state)
    reporter = chainer.Reporter()
    for link in (target, eval_func):  # `eval_func` may be a chain that contains the target
        if isinstance(link, chainer.Link):
            reporter.add_observers("target", link.namedlinks())
    try:
        with reporter.scope({}):
            yield
    finally:
        np.random.set_state(random_state)  # noqa: NPY002
        steps.update(in_steps)
        for link, name, value, before in persistent:
            link.__dict__[name] = value
            if isinstance(value, chainer.get_array_types()):
                value[...] = before


def _num_batches(iterator: Iterable[Any], num_passes: int) -> int | None:
    if hasattr(iterator, "dataset") and hasattr(iterator, "batch_size"):
        return num_passes * -(-len(iterator.dataset) // iterator.batch_size)
    return num_passes * length_hint(iterator) or None
