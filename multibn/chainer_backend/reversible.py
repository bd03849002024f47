"""Reversible blocks of Chainer links: backpropagation recomputes their activations."""

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer import FunctionNode, Variable
from chainer.backends import cuda

from multibn._typing import Array, check_choice
from multibn.chainer_backend import forgetting
from multibn.engine import recompute

Mode: TypeAlias = Literal["auto", "reversible", "stored"]


class ReversibleSequence(chainer.Chain):
    """Blocks `y1 = x1 + F(x2); y2 = x2 + G(y1)` whose memory does not grow with their number.

    In training, stores the outputs of the last block only. The backward pass goes from the last
    block to the first and runs F and G once more, for their gradients and for the inputs of the
    block (Gomez et al. 2017). Gradients are those of `"stored"` up to the rounding of the
    recomputed inputs.

    Collective if F and G are. `MultiNodeBatchNormalization` links in F and G communicate once in
    the forward pass and once in the backward pass, and not when F and G run again.

    Parameters
    ----------
    blocks
        Pairs (F, G) of links or other callables, each from one Variable to one. F returns the shape
        and dtype of the first stream, G those of the second. A link may occur several times and
        then shares its weights.
    mode
        `"reversible"`, or `"stored"` for Chainer's ordinary graph of the same blocks. `"auto"` is
        `"reversible"` with `chainer.config.train`, and `"stored"` in evaluation.

    Attributes
    ----------
    layers
        ChainList of a Chain for each block, with the links `F` and `G`: the parameters are
        `/layers/0/F/...`. A link that occurs several times is stored at its first place only. Other
        callables are not stored here; their parameters get gradients, too.
    mode
        May be changed.

    Raises
    ------
    ValueError
        If `blocks` is empty, one of them is no pair, or `mode` is unknown.
    TypeError
        If F or G is not callable.

    Notes
    -----
    F and G run again with `chainer.config.in_recomputing`, and with the `train`, `dtype` and random
    numbers of the first pass; afterwards the generators' states are restored, and no generator of
    the user is seeded. Parameters, and averages in evaluation, must not change between the passes.

    CuPy's generators do not reveal their state: on a GPU, each F and G that draws random numbers
    gets a generator of its own, seeded from the user's. cuDNN's drop-out has further states, which
    are not repeated: set `chainer.config.use_cudnn = "never"`.

    Examples
    --------
    >>> import numpy as np
    >>> from chainer import functions as F, links as L
    >>> from multibn.chainer_backend import ReversibleSequence
    >>> model = ReversibleSequence([(L.Linear(8, 8), F.tanh) for _ in range(4)])
    >>> y1, y2 = model(np.ones((2, 8), "f"), np.ones((2, 8), "f"))
    >>> F.sum(y1 + y2).backward()  # runs F and G again, from the last block to the first
    >>> model.layers[0].F.W.grad.shape
    (8, 8)
    """

    def __init__(self, blocks: Iterable[tuple[Any, Any]], *, mode: Mode = "auto") -> None:
        check_choice("mode", mode, Mode)
        pairs = [_checked_pair(i, pair) for i, pair in enumerate(blocks)]
        if not pairs:
            raise ValueError("`blocks` must have at least one pair (F, G): got none.")
        super().__init__()
        self.mode: Mode = mode
        with self.init_scope():
            self.layers = chainer.ChainList(*(chainer.Chain() for _ in pairs))
        # Links are stored by their place in `layers`, so that a copy calls its own links.
        self._functions: list[Any] = []
        places: dict[int, tuple[int, str]] = {}
        for i, pair in enumerate(pairs):
            for name, function in zip("FG", pair, strict=True):
                if isinstance(function, chainer.Link):
                    if id(function) not in places:
                        self.layers[i].add_link(name, function)
                        places[id(function)] = i, name
                    function = places[id(function)]
                self._functions.append(function)

    def forward(self, x1: Any, x2: Any) -> tuple[Variable, Variable]:
        """The outputs `(y1, y2)` of the last block.

        Parameters
        ----------
        x1, x2
            Variables or arrays of any shapes that F and G take.

        Raises
        ------
        TypeError, ValueError
            If F or G does not return a Variable of the shape and dtype of its stream.
        RuntimeError
            In the backward pass of `"reversible"`, if F or G calls other links the second time, or
            with `enable_double_backprop=True`: use `mode="stored"`.
        """
        streams = [chainer.as_variable(x) for x in (x1, x2)]
        recomputes = self.mode == "reversible" or (self.mode == "auto" and chainer.config.train)
        if recomputes and chainer.config.enable_backprop:
            y1, y2 = _reversible(self._couplings(), streams)
            return y1, y2
        for coupling in self._couplings():
            streams[coupling.target] = streams[coupling.target] + coupling.added(streams)
        return streams[0], streams[1]

    def inverse(self, y1: Any, y2: Any) -> tuple[Variable, Variable]:
        """The inputs `(x1, x2)` of `forward` from its outputs, in evaluation; no gradient.

        Raises
        ------
        RuntimeError
            With `chainer.config.train`: random numbers and batch statistics are not known.
        """
        if chainer.config.train:
            raise RuntimeError(
                "`inverse` is for evaluation: got chainer.config.train = True, and the random "
                "numbers and batch statistics of the forward pass are not known. Call it within "
                'chainer.using_config("train", False).'
            )
        streams = [chainer.as_variable(y) for y in (y1, y2)]
        with chainer.no_backprop_mode():
            for coupling in reversed(self._couplings()):
                streams[coupling.target] = streams[coupling.target] - coupling.added(streams)
        return streams[0], streams[1]

    def _couplings(self) -> list["_Coupling"]:
        couplings = []
        for k, function in enumerate(self._functions):
            if isinstance(function, tuple):
                i, name = function
                function = getattr(self.layers[i], name)
            name = f"{'FG'[k % 2]} of block {k // 2}"
            couplings.append(_Coupling(name, function, 1 - k % 2, k % 2))
        return couplings


def _checked_pair(i: int, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"`blocks` must be pairs (F, G): got {pair!r} for block {i}.")
    for name, function in zip("FG", pair, strict=True):
        if not callable(function):
            raise TypeError(
                f"{name} of block {i} of `blocks` must be a link or another callable: "
                f"got {type(function).__qualname__}."
            )
    return pair[0], pair[1]


class _Coupling(NamedTuple):
    """Half a block: `streams[target] += function(streams[source])`."""

    name: str
    function: Callable[[Variable], Any]
    source: int
    target: int

    def added(self, streams: Sequence[Variable]) -> Variable:
        """`function(streams[source])`, with the shape and dtype of `streams[target]`."""
        added = self.function(streams[self.source])
        if not isinstance(added, Variable):
            raise TypeError(f"{self.name} must return a Variable: got {type(added).__qualname__}.")
        to = streams[self.target]
        if (added.shape, added.dtype) != (to.shape, to.dtype):
            raise ValueError(
                f"{self.name} must return the shape and dtype of the stream it is added to, "
                f"{to.shape} and {to.dtype}: got {added.shape} and {added.dtype}."
            )
        return added


def _reversible(couplings: Sequence[_Coupling], inputs: Sequence[Variable]) -> tuple[Variable, ...]:
    """The first pass, as one function in the graph for all couplings."""
    streams = [v.array for v in inputs]
    passes = []
    for coupling in couplings:
        first = _Pass(coupling)
        streams[coupling.target] = streams[coupling.target] + first.run(streams)
        passes.append(first)
    leaves = list({id(v): v for p in passes for v in p.leaves}.values())
    return _Reversible(passes, leaves, streams).apply((*inputs, *leaves))


class _Pass:
    """One coupling's pass in one call, and the state to run it again."""

    def __init__(self, coupling: _Coupling) -> None:
        self.coupling = coupling
        self._config = {name: getattr(chainer.config, name) for name in ("train", "dtype")}
        self._random = _RandomNumbers()

    def run(self, streams: Sequence[Array]) -> Array:
        """Run the coupling's function; returns the array that the target stream adds."""
        variables = [Variable(x) for x in streams]
        x = variables[self.coupling.source]
        with (
            chainer.using_device(x.device),
            chainer.using_config("_will_recompute", forgetting.first_pass_mark()),
            recompute.recording() as tape,
            self._random.noted(x.array),
        ):
            added = self.coupling.added(variables)
        self._again = recompute.replaying(tape)
        # The variables that `added` depends on: parameters above all.
        self.leaves = [v for v in _leaves(added) if v is not x]
        return added.array

    def run_again(self, streams: Sequence[Array]) -> tuple[Variable, Variable]:
        """Run the function again on a new Variable of the source; returns this Variable and y."""
        x = Variable(streams[self.coupling.source])
        with ExitStack() as stack:
            for name, value in self._config.items():
                stack.enter_context(chainer.using_config(name, value))
            stack.enter_context(chainer.using_device(x.device))
            stack.enter_context(chainer.using_config("in_recomputing", True))
            stack.enter_context(chainer.force_backprop_mode())
            stack.enter_context(self._again)
            stack.enter_context(self._random.repeated())
            return x, self.coupling.function(x)


class _Reversible(FunctionNode):
    """All couplings of a call, as a function of the two inputs and of the leaves."""

    def __init__(
        self, passes: Sequence[_Pass], leaves: Sequence[Variable], outputs: Sequence[Array]
    ) -> None:
        super().__init__()
        self._passes, self._leaves, self._computed = passes, leaves, outputs

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0, 1))
        outputs = tuple(self._computed)
        del self._computed
        return outputs

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        if chainer.config.enable_backprop:
            raise RuntimeError(
                "a reversible sequence cannot be differentiated twice: got a backward pass with "
                'enable_double_backprop=True. Use mode="stored" for gradients of gradients, or '
                'mode="auto" in evaluation.'
            )
        streams = [y.array for y in self.get_retained_outputs()]
        gradients = list(grad_outputs)
        leaf_gradients: dict[int, Variable | None] = {id(v): None for v in self._leaves}
        for step in reversed(self._passes):
            _step_back(step, streams, gradients, leaf_gradients)
        return (*gradients, *leaf_gradients.values())


def _step_back(
    step: _Pass,
    streams: list[Array],
    gradients: list[Variable | None],
    leaf_gradients: dict[int, Variable | None],
) -> None:
    """Turn `streams` and their `gradients` after a coupling into those before it.

    Must stay a function: when it returns, the graph of the coupling is freed.
    """
    source, target = step.coupling.source, step.coupling.target
    x, added = step.run_again(streams)
    streams[target] = streams[target] - added.array
    gradient = gradients[target]
    if gradient is None:
        return
    gx, *others = chainer.grad([added], [x, *step.leaves], [gradient])
    gradients[source] = _sum(gradients[source], gx)
    for leaf, g in zip(step.leaves, others, strict=True):
        leaf_gradients[id(leaf)] = _sum(leaf_gradients[id(leaf)], g)


def _sum(a: Variable | None, b: Variable | None) -> Variable | None:
    """`a + b`, where None stands for the zero gradient of a variable without part in the loss."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


def _leaves(y: Variable) -> Iterator[Variable]:
    """The variables at the start of the graph of `y` that somebody still refers to."""
    nodes = [y.node] if y.requires_grad else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.creator_node is not None:
            new = [n for n in node.creator_node.inputs if n.requires_grad and n not in seen]
            seen.update(new)
            nodes += new
        elif (leaf := node.get_variable_or_none()) is not None:
            yield leaf


class _RandomNumbers:
    """The states of the generators of NumPy and CuPy, to draw the same numbers a second time."""

    def __init__(self) -> None:
        self._numpy: Any = None
        self._cupy_seed: int | None = None

    @contextmanager
    def noted(self, x: Array) -> Iterator[None]:
        """Context of the first pass, on arrays like `x`; stores states only if they change."""
        before = _numpy_state()
        if isinstance(x, np.ndarray):
            yield
        else:
            user = cuda.cupy.random.get_random_state()
            with _cupy_generator(lambda: int(user.randint(0, 2**31))) as generator:
                yield
            self._cupy_seed = generator.seeded_with
        if pickle.dumps(_numpy_state()) != pickle.dumps(before):
            self._numpy = before

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Context of a pass that draws the same numbers; restores the generators afterwards."""
        with ExitStack() as stack:
            if self._numpy is not None:
                stack.callback(_set_numpy_state, _numpy_state())
                _set_numpy_state(self._numpy)
            if self._cupy_seed is not None:
                seed = self._cupy_seed
                stack.enter_context(_cupy_generator(lambda: seed))
            yield


# Chainer draws from NumPy's global generator.
_numpy_state = functools.partial(np.random.get_state, legacy=False)
_set_numpy_state = np.random.set_state


@contextmanager
def _cupy_generator(seed: Callable[[], int]) -> Iterator[Any]:
    """Give the current device another generator, which is seeded at its first use."""
    random = cuda.cupy.random
    user = random.get_random_state()
    generator = _generator_class()(seed)
    random.set_random_state(generator)
    try:
        yield generator
    finally:
        random.set_random_state(user)


@functools.cache
def _generator_class() -> Any:
    base: Any = cuda.cupy.random.RandomState

    class Generator(base):
        def __init__(self, seed: Callable[[], int]) -> None:
            self.seed_of_first_use = seed
            self.seeded_with: int | None = None

        def __getattr__(self, name: str) -> Any:
            """Create the generator at the first access to one of its attributes."""
            if self.seeded_with is not None:
                raise AttributeError(name)
            self.seeded_with = self.seed_of_first_use()
            super().__init__(self.seeded_with)
            return getattr(self, name)

        def __del__(self) -> None:
            if self.seeded_with is not None:
                super().__del__()

    return Generator
