"""Exchange the batch normalization links of a model for multi-node ones."""

import copy
import warnings
from functools import partial
from typing import Any

import chainer
from chainer import links as L

from multibn._typing import Nonfinite, RunningVar, Weighting, check_bool, list_obstacles, overridden
from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization, check_link
from multibn.communicators import CommunicatorLike
from multibn.engine.running import is_running_statistic


def create_mnbn_model(
    link: chainer.Link,
    comm: CommunicatorLike,
    communication_backend: str = "auto",
    *,
    weighting: Weighting = "element",
    avg_var: RunningVar = "unbiased_global",
    nonfinite: Nonfinite = None,
    strict: bool = False,
) -> chainer.Link:
    """A copy of a model in which every L.BatchNormalization is a `MultiNodeBatchNormalization`.

    Takes the place of chainermn.links.create_mnbn_model. A deep copy: it shares no array with
    `link`, and shares inside of itself the parameters and links that `link` does. Parameters,
    moving averages, `axis`, `decay` and `eps` carry over; communicators among the attributes of
    links are not copied. The way back is Chainer's `link.copyparams(model)`, which copies
    parameters and moving averages. Not collective.

    Parameters
    ----------
    link
        A Chain, ChainList, Sequential, or a bare link.
    comm, communication_backend, weighting, avg_var, nonfinite
        As `MultiNodeBatchNormalization`'s.
    strict
        Whether a link that cannot be converted is an error, and a model without a link to convert.

    Raises
    ------
    TypeError, ValueError
        As `MultiNodeBatchNormalization`, also for `decay` and `eps` of the model's links.
        ValueError for a link that takes its size from an input, before the first one. TypeError as
        `strict` says.

    Warns
    -----
    UserWarning
        One warning for all links that are copied as they are, with paths for each reason: a class
        that overrides more than the constructor, as L.BatchRenormalization does, or one that has
        moving averages and is no L.BatchNormalization, as conditional normalizations of GANs have
        and ChainerMN's own link. One if the model has no link to convert. One for links that share
        already, and have other options than those that were passed.

    Examples
    --------
    >>> from multibn.chainer import create_mnbn_model
    >>> from chainer import links as L
    >>> model = create_mnbn_model(L.BatchNormalization(8), None)
    >>> type(model).__name__
    'MultiNodeBatchNormalization'
    """
    check_link("link", link)
    check_bool(strict=strict)
    make = partial(
        MultiNodeBatchNormalization,
        comm=comm,
        communication_backend=communication_backend,
        weighting=weighting,
        avg_var=avg_var,
        nonfinite=nonfinite,
    )
    make(1)  # raises for wrong arguments, even if the model has no batch normalization
    norms: list[L.BatchNormalization] = []
    mine = vars(LinkOptions(weighting=weighting, avg_var=avg_var, nonfinite=nonfinite))
    asked = {name: v for name, v in mine.items() if v != getattr(LinkOptions, name)}
    shared: dict[str, str] = {}
    obstacles = others(link)
    # The memo of the deep copy holds the new links, so that they replace the old ones in children,
    # Sequentials and any other attributes, and shared parameters stay shared.
    memo: dict[int, Any] = {}
    for path, each in link.namedlinks():
        # A communicator stays itself: its ranks would have to make a copy together.
        kept = [v for v in vars(each).values() if hasattr(type(v), "allreduce")]
        memo |= {id(communicator): communicator for communicator in kept}
        if isinstance(each, MultiNodeBatchNormalization):
            has = vars(LinkOptions.of(each))
            shared[path] = ", ".join(f"{k}={has[k]!r}" for k, v in asked.items() if has[k] != v)
        if not isinstance(each, L.BatchNormalization):
            continue
        if names := overridden(type(each), lambda cls: cls is L.BatchNormalization):
            why = f"its class overrides {', '.join(names)}, which would be lost"
            obstacles[path] = f"{type(each).__module__}.{type(each).__qualname__}: {why}"
        else:
            norms.append(each)
    if unlike := {path: has for path, has in shared.items() if has}:
        message = list_obstacles(unlike, "link(s) are copied as they are, they share already")
        warnings.warn(message, stacklevel=2)
    message = "`link` has no L.BatchNormalization: nothing is converted. "
    message += "Its links share already." if shared else "Build the model with some."
    if obstacles:
        message = list_obstacles(obstacles, "link(s) are copied as they are, statistics not shared")
    if strict and (obstacles or not norms):
        raise TypeError(message)
    if obstacles or not norms:
        warnings.warn(message, stacklevel=2)
    for old in norms:
        if old.avg_mean is None:
            raise ValueError(
                "batch normalization links must have a size: got one in `link` that has seen no "
                "input yet. Call the model once before."
            )
        # The old link's parameters, if there are any, come with its attributes.
        options: Any = {"decay": old.decay, "eps": old.eps, "axis": old.axis}
        new = make(old.avg_mean.shape, **options, use_gamma=False, use_beta=False)
        memo[id(old)] = new
        new.__dict__.update(copy.deepcopy(old.__dict__, memo), axis=new.axis)
    return copy.deepcopy(link, memo)


def others(model: chainer.Link) -> dict[str, str]:
    """Why links with moving averages are no batch normalization of Chainer's, by their paths."""
    kinds = MultiNodeBatchNormalization, L.BatchNormalization
    return {
        path: f"{type(link).__module__}.{type(link).__qualname__}: it is no L.BatchNormalization"
        for path, link in model.namedlinks()
        if not isinstance(link, kinds) and any(map(is_running_statistic, link._persistent))
    }
