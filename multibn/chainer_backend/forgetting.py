"""chainer.functions.forget, whose blocks run twice, with batch statistics communicated once."""

from collections.abc import Callable
from typing import Any

from chainer import functions as F

from multibn.engine import recompute


def forget(func: Callable[..., Any], *xs: Any) -> Any:
    """chainer.functions.forget in which multi-node links communicate and update once.

    Takes the place of `chainer.functions.forget`, with its arguments and result. In the backward
    pass the block runs again, replays the batch statistics of its first pass in order, and gives
    the numbers of `func(*xs)` bit for bit. `func` may use a link several times, and blocks may
    share links and contain blocks. Collective if `func` is: its links communicate once in the
    forward pass and once in the backward pass.

    Raises
    ------
    RuntimeError
        In the backward pass, if `func` uses other links the second time, or for second derivatives.

    Notes
    -----
    In Chainer's own F.forget, links update their averages once, too, and send the forward message a
    second time when the block runs again.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.chainer_backend import MultiNodeBatchNormalization, forget
    >>> link = MultiNodeBatchNormalization(8, None)
    >>> forget(link, np.random.randn(4, 8).astype("f")).shape
    (4, 8)
    """
    first = recompute.recording()
    again = recompute.replaying(first.tape)
    passes = [first]

    def run(*inputs: Any) -> Any:
        with passes.pop() if passes else again:
            return func(*inputs)

    return F.forget(run, *xs)
