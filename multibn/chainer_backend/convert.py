"""Exchange the batch normalization links of a model for multi-node ones."""

import copy
import warnings
from functools import partial
from typing import Any

import chainer
from chainer import links as L

from multibn._typing import Nonfinite, RunningVar, Weighting, overridden
from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.communicators import CommunicatorLike


def create_mnbn_model(
    link: chainer.Link,
    comm: CommunicatorLike,
    communication_backend: str = "auto",
    *,
    weighting: Weighting = "element",
    avg_var: RunningVar = "unbiased_global",
    nonfinite: Nonfinite = None,
) -> chainer.Link:
    """A copy of a model in which every L.BatchNormalization is a `MultiNodeBatchNormalization`.

    Takes the place of chainermn.links.create_mnbn_model. A deep copy: it shares no array with
    `link`, and shares inside of itself the parameters and links that `link` does. Parameters,
    moving averages, `axis`, `decay` and `eps` carry over. The way back is Chainer's
    `link.copyparams(model)`, which copies parameters and moving averages. Not collective.

    Parameters
    ----------
    link
        A Chain, ChainList, Sequential, or a bare link.
    comm, communication_backend, weighting, avg_var, nonfinite
        As `MultiNodeBatchNormalization`'s.

    Raises
    ------
    TypeError, ValueError
        As `MultiNodeBatchNormalization`, also for `decay` and `eps` of the model's links.
        ValueError for a link that takes its size from an input, before the first one.

    Warns
    -----
    UserWarning
        For a link that is copied as it is, because its class overrides more than the constructor,
        as L.BatchRenormalization does, or is ChainerMN's own; if the model has no link to convert.

    Examples
    --------
    >>> from multibn.chainer_backend import create_mnbn_model
    >>> from chainer import links as L
    >>> model = create_mnbn_model(L.BatchNormalization(8), None)
    >>> type(model).__name__
    'MultiNodeBatchNormalization'
    """
    make = partial(
        MultiNodeBatchNormalization,
        comm=comm,
        communication_backend=communication_backend,
        weighting=weighting,
        avg_var=avg_var,
        nonfinite=nonfinite,
    )
    make(1)  # raises for wrong arguments, even if the model has no batch normalization
    norms = [each for each in link.links() if isinstance(each, L.BatchNormalization)]
    if not norms:
        warnings.warn(
            "`link` has no L.BatchNormalization: nothing is converted. Links of ChainerMN's own "
            "stay as they are: build the model with L.BatchNormalization.",
            stacklevel=2,
        )
    # The memo of the deep copy holds the new links, so that they replace the old ones in children,
    # Sequentials and any other attributes, and shared parameters stay shared.
    memo: dict[int, Any] = {}
    for old in norms:
        if names := overridden(type(old), lambda cls: cls is L.BatchNormalization):
            warnings.warn(
                f"{type(old).__module__}.{type(old).__qualname__} is copied as it is, its "
                f"statistics stay local: its class overrides {', '.join(names)}, which would be "
                "lost.",
                stacklevel=2,
            )
            continue
        if old.avg_mean is None:
            raise ValueError(
                "batch normalization links must have a size: got one in `link` that has seen no "
                "input yet. Call the model once before."
            )
        # The old link's parameters, if there are any, come with its attributes.
        new = make(1, decay=old.decay, eps=old.eps, use_gamma=False, use_beta=False)
        memo[id(old)] = new
        new.__dict__.update(copy.deepcopy(old.__dict__, memo))
    return copy.deepcopy(link, memo)
