"""Exchange the batch normalization links of a model for multi-node ones, and back."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import chainer
from chainer import links as L

from multibn._typing import RunningVar, Weighting, overridden
from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.communicators import CommunicatorLike, SingleProcess
from multibn.communicators.outcomes import Nonfinite

# Attributes that L.BatchNormalization does not have.
_MULTI_NODE = {*vars(MultiNodeBatchNormalization(1, SingleProcess())), "_single_node_class"}
_MULTI_NODE -= {*vars(L.BatchNormalization(1))}


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
    moving averages, `axis`, `decay` and `eps` carry over. Not collective.

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

    def convert(old: Any) -> Any:
        if old.avg_mean is None:
            raise ValueError(
                "batch normalization links must have a size: got one in `link` that has seen no "
                "input yet. Call the model once before."
            )
        # `_copy_with` brings the old link's attributes, and its parameters, if there are any.
        new = make(1, decay=old.decay, eps=old.eps, use_gamma=False, use_beta=False)
        new._single_node_class = type(old)
        return new

    if not any(isinstance(each, L.BatchNormalization) for each in link.links()):
        warnings.warn(
            "`link` has no L.BatchNormalization: nothing is converted. Links of ChainerMN's own "
            "stay as they are: build the model with L.BatchNormalization.",
            stacklevel=2,
        )
    return _copy_with(link, L.BatchNormalization, convert, "its statistics stay local")


def revert_mnbn_model(link: chainer.Link) -> chainer.Link:
    """A copy of a model in which every `MultiNodeBatchNormalization` is an L.BatchNormalization.

    The inverse of `create_mnbn_model`: a converted link gets its old class back. For evaluation,
    for training in one process, and for files that a reader without multibn can load. `weighting`
    and `avg_var` are lost. Not collective.

    Warns
    -----
    UserWarning
        As `create_mnbn_model`.

    Examples
    --------
    >>> from multibn.chainer_backend import MultiNodeBatchNormalization, revert_mnbn_model
    >>> type(revert_mnbn_model(MultiNodeBatchNormalization(8, None))).__name__
    'BatchNormalization'
    """

    def revert(old: Any) -> Any:
        new = old._single_node_class.__new__(old._single_node_class)
        new._initial_avg_mean = new._initial_avg_var = None
        return new

    return _copy_with(
        link, MultiNodeBatchNormalization, revert, "it goes on sharing its statistics"
    )


def _copy_with(
    link: chainer.Link, cls: type, convert: Callable[[Any], Any], consequence: str
) -> chainer.Link:
    """A deep copy of `link` in which `convert` replaces all links of `cls`.

    The memo of the deep copy holds the new links, so that they replace the old ones in children,
    Sequentials and any other attributes, and shared parameters stay shared.
    """
    memo: dict[int, Any] = {}
    for old in link.links():
        if not isinstance(old, cls):
            continue
        if names := overridden(type(old), lambda other: other is cls):
            warnings.warn(
                f"{type(old).__module__}.{type(old).__qualname__} is copied as it is, "
                f"{consequence}: its class overrides {', '.join(names)}, which would be lost.",
                stacklevel=3,
            )
            continue
        new = memo[id(old)] = convert(old)
        attributes = {k: v for k, v in old.__dict__.items() if k not in _MULTI_NODE}
        new.__dict__.update(copy.deepcopy(attributes, memo))
    return copy.deepcopy(link, memo)
