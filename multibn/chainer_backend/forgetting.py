"""chainer.functions.forget, whose blocks run twice, with batch statistics communicated once.

Chainer sets `chainer.config._will_recompute` in the first pass of a forgotten block and
`in_recomputing` in the second, and nothing tells to which first pass a second one belongs. `forget`
gives each call a tape of its own. Under Chainer's own F.forget, around `forget` or in it too, a
message of the second pass is answered as the same message was in the first: a recomputed block does
the same both times, so its local moments are the same bit for bit.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import functions as F

from multibn import recompute
from multibn._typing import Array
from multibn.communicators import Communicator


def forget(func: Callable[..., Any], *xs: Any) -> Any:
    """chainer.functions.forget in which multi-node links communicate and update once.

    Takes the place of `chainer.functions.forget`, with its arguments and result. The block is run
    again in the backward pass as it is there, and gives the numbers of `func(*xs)` bit for bit: the
    second pass replays the batch statistics of the first, in order. A link may be used several
    times in `func`, in several blocks, and in blocks inside of blocks.

    Collective if `func` is: the links of `func` communicate once in the forward pass, not again
    when it is run again, and once in the backward pass.

    Raises
    ------
    RuntimeError
        In the backward pass, if `func` meets other links the second time, or if it is to be
        differentiated twice.

    Notes
    -----
    Chainer's own F.forget also updates averages once. There, links communicate once where arrays
    are in host memory, if each rank's local moments are the same both times; two uses of a link
    whose local moments are the same on one rank, but not on another, are not told apart. On a GPU,
    where looking at the moments would make it wait, they communicate twice.
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


# What `_will_recompute` is where all blocks around have tapes. To Chainer it is as good as True,
# which it sets again in a block of its own.
_TAPED = "taped"


def first_pass_mark() -> Any:
    """What to set `_will_recompute` to in a block that has a tape; call it outside of the block."""
    # In a block of Chainer's own as it is: that will look for the messages of this one, too.
    return chainer.config._will_recompute or _TAPED


def remembering(communicator: Communicator, /, *, given_as: object) -> Communicator:
    """`communicator`; under F.forget, one that notes the answers of a first pass for the second.

    `given_as` is the object that stands for the communicator in both passes.
    """
    if chainer.config.in_recomputing or chainer.config._will_recompute not in (False, _TAPED):
        return _Remembering(communicator, given_as)
    return communicator


# The latest sums, with the object that the id is of: were it gone, another could be given the id. A
# block may never be recomputed, so there must be an end to them; 1024 messages are more than a step
# of ResNet-152 has, and take 33 MB for 1000 channels each.
_CAPACITY = 1024
_sums: OrderedDict[tuple[int, bytes], tuple[object, Array]] = OrderedDict()


class _Remembering:
    """A communicator that answers a recomputation from memory."""

    def __init__(self, communicator: Communicator, given_as: object) -> None:
        self.wrapped, self._given_as = communicator, given_as
        self.rank, self.size = communicator.rank, communicator.size

    def allreduce(self, x: Array, /) -> Array:
        if not isinstance(x, np.ndarray):
            return self.wrapped.allreduce(x)
        key = id(self._given_as), x.tobytes()
        if chainer.config.in_recomputing:
            if key not in _sums:
                raise RuntimeError(
                    "this link is shown another input in the recomputation of a forgotten block "
                    f"than in any of the {len(_sums)} latest first passes on rank {self.rank}. A "
                    "recomputed block must do the same both times; if it does, use "
                    "multibn.chainer_backend.forget in place of chainer.functions.forget."
                )
            return _sums[key][1].copy()
        summed = self.wrapped.allreduce(x)
        _sums[key] = self._given_as, summed.copy()
        _sums.move_to_end(key)
        while len(_sums) > _CAPACITY:
            _sums.popitem(last=False)
        return summed

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.wrapped.split(color, key)
