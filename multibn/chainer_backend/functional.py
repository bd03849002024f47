"""Multi-node batch normalization as a function of arrays, for user-defined links."""

from types import SimpleNamespace
from typing import Any

import chainer
import numpy as np

from multibn._typing import Array, Nonfinite, Weighting
from multibn.chainer_backend import functions
from multibn.chainer_backend.links import LinkOptions
from multibn.communicators import CommunicatorLike, as_communicator
from multibn.communicators.layer_communicator import function_communicator
from multibn.engine.plan import NormArgs
from multibn.kernels import Running


def multi_node_batch_normalization(
    x: Any,
    gamma: Any,
    beta: Any,
    comm: CommunicatorLike = None,
    *,
    eps: float = 2e-5,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    decay: float = 0.9,
    axis: tuple[int, ...] | None = None,
    weighting: Weighting = "element",
    nonfinite: Nonfinite = None,
    mask: Array | None = None,
    lengths: Array | None = None,
) -> chainer.Variable:
    """Normalize `x` by the statistics of the batch of all ranks, as F.batch_normalization does.

    Collective: every rank of `comm` must call this function, and must run the backward pass if any
    rank does. It replaces chainer.functions.batch_normalization in links that call that function
    themselves, on slices for example.

    Parameters
    ----------
    x
        A Variable or an array of shape `(N, *channels, *spatial)`.
    gamma, beta
        Variables or arrays of the shape of the channels.
    running_mean, running_var
        Arrays with the shape of `gamma`, updated in place. Slices of a link's `avg_mean` and
        `avg_var` update that part. `running_var` gets the unbiased variance of the whole batch.
        Pass both, or neither to update nothing.
    comm, eps, decay, axis, weighting, nonfinite, mask, lengths
        As for `MultiNodeBatchNormalization` and its calls.

    Raises
    ------
    TypeError, ValueError
        If shapes do not fit, or an option is out of range. The other ranks raise RuntimeError.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.chainer import MultiNodeBatchNormalization, multi_node_batch_normalization
    >>> link = MultiNodeBatchNormalization(2, None)
    >>> running = {"running_mean": link.avg_mean[:1], "running_var": link.avg_var[:1]}
    >>> x = np.asarray([[1.0], [3.0]], "f")
    >>> y = multi_node_batch_normalization(x, link.gamma[:1], link.beta[:1], **running)
    >>> print(y.array.ravel().round(3), link.avg_mean)
    [-1.  1.] [0.2 0. ]
    """
    options = LinkOptions(eps=eps, weighting=weighting, nonfinite=nonfinite, decay=decay)
    compared = vars(options) | {"decay": None if running_mean is None else decay}
    group = as_communicator(comm)
    communicator = function_communicator("multi_node_batch_normalization", group, compared)

    def check_options() -> None:
        options.check()
        if (running_mean is None) is not (running_var is None):
            raise ValueError(
                "`running_mean` and `running_var` must both be arrays, or both None: got one."
            )

    given = {"running_mean": running_mean, "running_var": running_var}
    args = functions.checked(
        NormArgs(x, gamma, beta, eps, axis, mask=mask),  # type: ignore[arg-type]
        np.shape(chainer.as_array(gamma)),
        communicator,
        averages={} if running_mean is None else given,
        check_options=check_options,
        lengths=lengths,
    )
    link = SimpleNamespace(layer_communicator=communicator, weighting=weighting)
    plan = functions.prepare(args, link, finetune=False)
    if running_mean is not None and not chainer.config.in_recomputing:  # by F.forget
        args = args._replace(running=Running(running_mean, running_var, 1.0 - decay))
    (y,) = functions.BatchNormalization(plan, args).apply([getattr(args, k) for k in plan.given])
    return y
