"""Batch normalization links for Chainer."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import chainer
import numpy as np
from chainer import functions as F
from chainer import initializers

from multibn._typing import (
    Nonfinite,
    RunningVar,
    Weighting,
    check_bool,
    check_choice,
    check_ints,
    check_number,
)
from multibn.chainer_backend import functions
from multibn.chainer_backend.functions import masked
from multibn.communicators import Communicator, CommunicatorLike, SingleProcess, as_communicator
from multibn.communicators.diagnostics import find_module_path
from multibn.communicators.layer_communicator import Compared, LayerCommunicator
from multibn.communicators.transports.chainermn import ChainerMN, select_backend
from multibn.engine.plan import NormArgs
from multibn.engine.running import StepAccumulator
from multibn.kernels import Running
from multibn.options import NormOptions


def check_link(name: str, link: object) -> None:
    """Raise TypeError unless `link`, the value of argument `name`, is a chainer.Link."""
    if not isinstance(link, chainer.Link):
        raise TypeError(
            f"`{name}` must be a chainer.Link: got {type(link).__qualname__}. Pass the model."
        )


@dataclass(frozen=True, kw_only=True)
class LinkOptions(NormOptions):
    """The options of a link, under Chainer's names."""

    decay: float = 0.9
    use_gamma: bool = True
    use_beta: bool = True
    avg_var: RunningVar = "unbiased_global"
    dtype: Any = None
    axis: tuple[int, ...] | None = None

    attributes = MappingProxyType(
        {"use_gamma": "gamma", "use_beta": "beta"}
        | {"avg_var": "avg_var_convention", "dtype": "_highprec_dtype"}
    )

    def check(self) -> None:
        super().check()
        check_number("decay", self.decay, "[0, 1]")
        check_choice("avg_var", self.avg_var, RunningVar)


class MultiNodeBatchNormalization(chainer.Link):
    """Batch normalization over the batches of all ranks of a communicator.

    N ranks compute the same numbers as one process on the concatenated batch, however the batch is
    split; a rank may have no samples. Replaces chainermn.links.MultiNodeBatchNormalization, with
    the same parameters, persistent values and npz files.

    With `chainer.config.train`, a call is collective: every rank must call the link. The forward
    pass has one allreduce of 2C+4 float64 numbers, the backward pass one of 2C+2. The first call
    has one more, of a fixed size. In evaluation the link does not communicate.

    Parameters
    ----------
    size
        Channels: a positive int or the shape of the channel axes.
    comm
        Anything that `multibn.as_communicator` accepts, for example a ChainerMN communicator.
    decay
        Decay rate of the moving averages, in [0, 1].
    eps
        Positive number that is added to the variance.
    dtype
        Floating-point dtype of parameters and moving averages. Default: `chainer.config.dtype`, or
        float32 for mixed16.
    use_gamma, use_beta, initial_gamma, initial_beta, communication_backend
        As for chainermn.links.MultiNodeBatchNormalization.
    axis
        The axes to reduce, an int or a tuple. Default: all except the channels, which are axis 1
        and, if `size` has several numbers, the axes after it.
    weighting
        How ranks are weighted. `"element"`: by elements per channel, for the statistics of the
        concatenated batch. `"sample"`: by batch size, so that inputs of different sizes, such as
        images in detection, contribute equally. `"rank"`: all non-empty ranks equally, to reproduce
        models trained with ChainerMN. The three agree if all ranks have equal shapes.
    avg_var
        Which variance is stored in `avg_var`: `"unbiased_global"`, `"unbiased_local"` (ChainerMN)
        or `"biased"`, see `multibn.engine.running_variance`.
    nonfinite
        What to do if a rank's input contains NaN, infinity or values that overflow: `"raise"`
        FloatingPointError on all ranks, or `"skip"` the batch: the output is NaN on all ranks, no
        moving average is updated, and a RuntimeWarning names the link and the ranks with such
        input. None: `"skip"` for float16, `"raise"` for other dtypes.
    fuse_relu
        Apply a ReLU in the same pass; `link(x, residual=residual)` adds an array like `x` before
        the ReLU.

    Attributes
    ----------
    gamma, beta
        Parameters, or None. Their gradients are means over the ranks.
    avg_mean, avg_var
        Moving averages; both start at 0, as ChainerMN's do.
    N
        Number of fine-tuning batches since `start_finetuning`.
    comm
        The ChainerMN communicator if the constructor got one, otherwise the multibn Communicator.
        May be assigned between two steps, on all ranks: anything that the constructor accepts.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.chainer import MultiNodeBatchNormalization
    >>> link = MultiNodeBatchNormalization(8, None)  # with ChainerMN, pass `comm`, not None
    >>> link(np.random.randn(4, 8).astype("f")).shape
    (4, 8)
    """

    gamma: Any = None
    beta: Any = None

    def __init__(
        self,
        size: int | tuple[int, ...],
        comm: CommunicatorLike,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: str = "auto",
        *,
        axis: int | tuple[int, ...] | None = None,
        weighting: Weighting = "element",
        avg_var: RunningVar = "unbiased_global",
        nonfinite: Nonfinite = None,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__()
        self._compared: Compared = {}
        self._communicator = _communicator_of(comm, communication_backend)
        self._communication_backend = communication_backend
        self.weighting: Weighting = weighting
        self.avg_var_convention: RunningVar = avg_var
        self.decay = decay
        self.eps = eps
        self.nonfinite: Nonfinite = nonfinite
        self.fuse_relu = fuse_relu
        self.check_options()
        check_bool(use_gamma=use_gamma, use_beta=use_beta)
        self._highprec_dtype = chainer.get_dtype(dtype, map_mixed16=np.float32)
        if self._highprec_dtype.kind != "f":
            raise TypeError(f"`dtype` must be a real floating-point dtype: got {dtype!r}.")
        check_ints("size", size if isinstance(size, Sequence) else [size])
        self.add_persistent("N", 0)
        self.add_persistent("avg_mean", np.zeros(size, self._highprec_dtype))
        self.add_persistent("avg_var", np.zeros(size, self._highprec_dtype))
        self.axis = None if axis is None else functions.as_axes(axis, self.avg_mean.ndim, 0)
        with self.init_scope():
            if use_gamma:
                self.gamma = self._parameter(1 if initial_gamma is None else initial_gamma)
            if use_beta:
                self.beta = self._parameter(0 if initial_beta is None else initial_beta)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in LinkOptions.attribute_names() and self in _layer_communicators:
            _layer_communicators[self].refresh_options()

    def check_options(self) -> None:
        """Raise TypeError or ValueError if an option is invalid; users may assign options later."""
        LinkOptions.of(self).check()

    @property
    def layer_communicator(self) -> LayerCommunicator:
        """This link's LayerCommunicator; errors name the link by its path in the model."""
        if self not in _layer_communicators:
            link_ref = weakref.ref(self)
            _layer_communicators[self] = LayerCommunicator(
                self._communicator,
                lambda: _path(link_ref()),
                type(self).__qualname__,
                options=lambda: vars(LinkOptions.of(link_ref())),
                compared=self._compared,
            )
        return _layer_communicators[self]

    @property
    def comm(self) -> Any:
        """The communicator that was passed to the constructor or assigned."""
        if isinstance(self._communicator, ChainerMN):
            return self._communicator.comm
        return self._communicator

    @comm.setter
    def comm(self, comm: CommunicatorLike) -> None:
        # None has no backend. Keep the name for a ChainerMN communicator that is assigned later.
        backend = "auto" if comm is None else self._communication_backend
        self._communicator = _communicator_of(comm, backend)
        _layer_communicators.pop(self, None)

    def forward(
        self,
        x: Any,
        finetune: bool = False,
        *,
        residual: Any = None,
        mask: Any = None,
        lengths: Any = None,
    ) -> chainer.Variable:
        """Normalize `x`, a Variable or array of shape `(N, C, *spatial)`.

        Parameters
        ----------
        x
            The input, of a real floating-point dtype.
        finetune
            In training, average the statistics of all batches since `start_finetuning` with equal
            weights, instead of with `decay`.
        residual
            Variable or array with the shape and dtype of `x`, added to the output before the ReLU
            of `fuse_relu=True`.
        mask, lengths
            `mask`: booleans, True for valid elements. The shape is that of `x` without the channel
            axes, or broadcasts to it. `lengths`: integers of shape `(N,)`, the number of valid
            elements of each sample along the first spatial axis. Invalid elements are ignored, even
            if they are NaN or infinite; their output and gradient are 0.

        Raises
        ------
        TypeError, ValueError
            If `x` is not floating-point, or its shape, `residual`, `mask` or `lengths` does not
            fit. ValueError if all ranks together have only one value per channel, or if the masks
            exclude every element.
        RuntimeError
            On the other ranks, if one rank rejects its input. On all ranks, if they are in
            different links, or in different phases of the same link.
        FloatingPointError
            On all ranks, if the moments of one rank are not finite (on a GPU one step later),
            unless `nonfinite` skips the batch.
        NotImplementedError
            In training inside chainer.static_graph.

        Notes
        -----
        Second derivatives (`enable_double_backprop=True`) are exact across ranks. At every order,
        gradients are those of the sum of all ranks' losses; for `gamma` and `beta`, divided by the
        number of ranks. A backward pass with `enable_double_backprop` computes in float64 and
        repeats the forward pass's allreduce. Differentiating an allreduce adds another one.
        """
        axis: Any = self.axis
        relu = self.fuse_relu
        args = NormArgs(
            x, self.gamma, self.beta, self.eps, axis, relu, mask=mask, residual=residual
        )
        if not chainer.config.train:
            return self._evaluate(self._checked(args, SingleProcess(), lengths))
        communicator = _layer_communicators.get(self) or self.layer_communicator
        key = plan = None
        if mask is lengths is None:
            key = functions.plan_key(x, residual, self, finetune)
            plan = communicator.plans.get(key)
        if plan is None:
            args = self._checked(args, communicator, lengths)
            plan = functions.prepare(args, self, finetune)
            if key is not None:
                communicator.cache_plan(key, plan)
        momentum = None if finetune else 1.0 - self.decay
        num_batches = self.xp.asarray(self.N, np.int64) if finetune else None
        convention = self.avg_var_convention
        own = Running(self.avg_mean, self.avg_var, momentum, convention, num_batches)
        running: Any = own
        if self in step_accumulators:
            running = step_accumulators[self] or StepAccumulator(self.avg_mean)
            step_accumulators[self], running.running = running, own
        args = args._replace(axis=plan.axis, running=running)
        if chainer.config.in_recomputing:  # the second pass of F.forget
            args = args._replace(running=None)
        arrays = [getattr(args, name) for name in plan.given]
        (y,) = functions.BatchNormalization(plan, args).apply(arrays)
        if finetune and running is own:
            self.store_count(own)
        return y

    def _checked(self, args: NormArgs, communicator: Communicator, lengths: Any) -> NormArgs:
        """Return `functions.checked` for a call of this link. Collective if it raises."""
        averages = {"avg_mean": self.avg_mean, "avg_var": self.avg_var}
        options: Any = {"check_options": self.check_options, "lengths": lengths}
        channels = np.shape(self.avg_mean)
        return functions.checked(args, channels, communicator, averages=averages, **options)

    def _evaluate(self, args: NormArgs) -> chainer.Variable:
        mean, var = self.avg_mean, self.avg_var
        gamma = self.xp.ones_like(mean) if self.gamma is None else self.gamma
        beta = self.xp.zeros_like(mean) if self.beta is None else self.beta
        x = masked(args.x, args.mask)
        y = F.fixed_batch_normalization(x, gamma, beta, mean, var, args.eps, args.axis)
        y = y if args.residual is None else y + args.residual
        return masked(F.relu(y) if args.relu else y, args.mask)

    def start_finetuning(self) -> None:
        """Set `N` to 0. Call this method before every fine-tuning except the first."""
        self.N = 0

    def store_count(self, running: Running) -> None:
        """Set `N` to the number of batches that have updated `running`."""
        if running.num_batches is not None:
            self.N = int(running.num_batches)  # synchronizes with a GPU: npz files need an int

    def _parameter(self, initial: Any) -> chainer.Parameter:
        initializer = initializers._get_initializer(initial)
        initializer.dtype = self._highprec_dtype
        return chainer.Parameter(initializer, self.avg_mean.shape)


# Not attributes of the links: a copied link needs a new LayerCommunicator, with the copy's name.
_layer_communicators: WeakKeyDictionary[chainer.Link, LayerCommunicator] = WeakKeyDictionary()

# The links in a `step_statistics` context, with an accumulator after the first call. A copy of a
# link is not in the context.
step_accumulators: WeakKeyDictionary[chainer.Link, StepAccumulator | None] = WeakKeyDictionary()


def _path(link: chainer.Link | None) -> str:
    """Return the link's path in the model whose forward pass is running, or ""."""
    path = find_module_path(link, chainer.Link, lambda model: model.namedlinks(skipself=True))
    return path.strip("/").replace("/", ".")


def _communicator_of(comm: CommunicatorLike, communication_backend: str) -> Communicator:
    communicator = as_communicator(comm)
    if isinstance(communicator, ChainerMN) and communication_backend != "auto":
        return ChainerMN(communicator.comm, communication_backend)
    select_backend(type(comm), communication_backend)
    return communicator
