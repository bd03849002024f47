"""chainer.functions.forget, whose blocks run twice, with batch statistics communicated once.

`forget` gives each of its calls a tape, which the second pass of the block replays. Chainer's own
F.forget does not tell which first pass a second pass repeats. There, a link finds the sum of a
message again by the bytes of the local message: a recomputed block does the same both times, so its
local moments are equal bit for bit.

`chainer.config._will_recompute` is False outside of blocks, and True, set by Chainer, in the first
pass of F.forget. In the first pass of a block with a tape it is "taped", which Chainer takes for
True and `remembering` for False.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import functions as F

from multibn._typing import Array
from multibn.communicators import Communicator
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
    In Chainer's own F.forget, links also update their averages once. On the CPU they communicate
    once, but one link must not have equal local moments in two uses on one rank and different ones
    on another. On a GPU they communicate twice, because reading the moments would make it wait.

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
    mark = first_pass_mark()

    def run(*inputs: Any) -> Any:
        if not passes:
            with again:
                return func(*inputs)
        with passes.pop(), chainer.using_config("_will_recompute", mark):
            return func(*inputs)

    return F.forget(run, *xs)


_TAPED = "taped"


def first_pass_mark() -> Any:
    """The value of `_will_recompute` for a block with a tape; call it outside of the block."""
    # True stays True: the second pass of an F.forget around this block repeats its messages, too.
    return chainer.config._will_recompute or _TAPED


def remembering(communicator: Communicator, /, *, owner: object) -> Communicator:
    """`communicator`, or under F.forget one that remembers its sums from first to second pass.

    `owner` is an object that is the same in both passes, unlike `communicator`.
    """
    if chainer.config.in_recomputing or chainer.config._will_recompute not in (False, _TAPED):
        return _Remembering(communicator, owner)
    return communicator


# The latest sums, by the id of the owner and the message. A value holds the owner, whose id another
# object could get otherwise. Bounded, for a block may never run again: 1024 messages are more than
# a step of ResNet-152 has, and take 33 MB for 1000 channels each.
_CAPACITY = 1024
_sums: OrderedDict[tuple[int, bytes], tuple[object, Array]] = OrderedDict()


class _Remembering:
    def __init__(self, communicator: Communicator, owner: object) -> None:
        self.wrapped, self._owner = communicator, owner
        self.rank, self.size = communicator.rank, communicator.size

    def allreduce(self, x: Array, /) -> Array:
        if not isinstance(x, np.ndarray):
            return self.wrapped.allreduce(x)
        key = id(self._owner), x.tobytes()
        if chainer.config.in_recomputing:
            if key not in _sums:
                raise RuntimeError(
                    "this link gets another input in the recomputation of a forgotten block than "
                    f"in any of the {len(_sums)} latest first passes on rank {self.rank}. A "
                    "recomputed block must do the same both times; if it does, use "
                    "multibn.chainer_backend.forget in place of chainer.functions.forget."
                )
            return _sums[key][1].copy()
        summed = self.wrapped.allreduce(x)
        _sums[key] = self._owner, summed.copy()
        _sums.move_to_end(key)
        while len(_sums) > _CAPACITY:
            _sums.popitem(last=False)
        return summed

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.wrapped.split(color, key)
