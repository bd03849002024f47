"""Exchange the batch normalization links of a model for multi-node ones."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import chainer
from chainer import links as L

from multibn._typing import Nonfinite, RunningVar, Weighting, check_bool, list_obstacles, overridden
from multibn._warnings import warn
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
        Raise if a link cannot be converted, or if the model has none to convert.

    Raises
    ------
    TypeError, ValueError
        As `MultiNodeBatchNormalization`, also for `decay` and `eps` of the model's links.
        ValueError for a link that takes its size from an input, before the first one. TypeError as
        `strict` says.

    Warns
    -----
    UserWarning
        One warning lists the links that are copied without conversion, by reason: a class that
        overrides more than the constructor, as L.BatchRenormalization does, or a class with moving
        averages that is not an L.BatchNormalization: conditional normalizations of GANs, and
        ChainerMN's own link. Another warning says that the model has no link to convert, a third
        one lists links that are already synchronized with different options.

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
    obstacles = find_unsupported_norms(link)
    # The memo of the deep copy holds the new links, so that they replace the old ones in children,
    # Sequentials and any other attributes, and shared parameters stay shared.
    memo: dict[int, Any] = {}
    for path, each in link.namedlinks():
        # Do not copy communicators: the constructor of some is collective.
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
        message = list_obstacles(
            unlike, "link(s) are synchronized already and keep their own options"
        )
        warn(message)
    message = "`link` has no L.BatchNormalization: nothing is converted. "
    message += "Its links are already synchronized." if shared else "Pass a model with one."
    if obstacles:
        message = list_obstacles(
            obstacles, "link(s) could not be converted, statistics will not be synchronized"
        )
    if strict and (obstacles or not norms):
        raise TypeError(message)
    if obstacles or not norms:
        warn(message)
    check_sizes("link", norms)
    for old in norms:
        # The old link's parameters, if there are any, come with its attributes.
        options: Any = {"decay": old.decay, "eps": old.eps, "axis": old.axis}
        new = make(old.avg_mean.shape, **options, use_gamma=False, use_beta=False)
        memo[id(old)] = new
        new.__dict__.update(copy.deepcopy(old.__dict__, memo), axis=new.axis)
    return copy.deepcopy(link, memo)


def check_sizes(name: str, links: Iterable[Any]) -> None:
    """Raise ValueError if a link of the argument `name` waits for its first input for a size."""
    if any(link.avg_mean is None for link in links):
        raise ValueError(
            f"a batch normalization link in `{name}` is not initialized (size=None). Call the "
            "model once first."
        )


def find_unsupported_norms(model: chainer.Link) -> dict[str, str]:
    """Return why links with moving averages are not L.BatchNormalization, by path."""
    kinds = MultiNodeBatchNormalization, L.BatchNormalization
    return {
        path: f"{type(link).__module__}.{type(link).__qualname__}: not an L.BatchNormalization"
        for path, link in model.namedlinks()
        if not isinstance(link, kinds) and any(map(is_running_statistic, link._persistent))
    }
