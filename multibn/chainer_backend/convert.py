"""Replace the batch normalization links of a model by multi-node ones."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import chainer
from chainer import links as L

from multibn._typing import Nonfinite, RunningVar, Weighting, check_bool, list_obstacles, overridden
from multibn._warnings import warn, warn_or_raise
from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization, check_link
from multibn.communicators import CommunicatorLike
from multibn.engine.running import is_running_statistic
from multibn.options import differing


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
    """Copy a model, and replace every L.BatchNormalization by `MultiNodeBatchNormalization`.

    Replaces chainermn.links.create_mnbn_model. The deep copy shares no array with `link`.
    Parameters and links that `link` uses in several places are shared in the copy, too. Parameters,
    moving averages, `axis`, `decay` and `eps` are kept. Communicators in the links' attributes are
    not copied. To convert back, call Chainer's `link.copyparams(model)`, which copies parameters
    and moving averages to the original. Not collective.

    Parameters
    ----------
    link
        A Chain, ChainList, Sequential, or a bare link.
    comm, communication_backend, weighting, avg_var, nonfinite
        As for `MultiNodeBatchNormalization`.
    strict
        Raise TypeError if a link cannot be converted, or if the model has no link to convert.

    Raises
    ------
    TypeError, ValueError
        As `MultiNodeBatchNormalization` raises, also for `decay` and `eps` of the model's links.
        ValueError if a link with `size=None` has not had its first input. TypeError if `link` is
        not a chainer.Link, and for `strict`.

    Warns
    -----
    UserWarning
        One warning lists the links that are copied without conversion, by reason. Either their
        class overrides more than the constructor (L.BatchRenormalization), or it has moving
        averages but is not an L.BatchNormalization (ChainerMN's link, conditional normalization of
        GANs). Other warnings say that the model has no link to convert, or list links that are
        already synchronized with different options.

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
    options: Any = {"weighting": weighting, "avg_var": avg_var, "nonfinite": nonfinite}
    options_and_group = options | {"comm": comm, "communication_backend": communication_backend}
    make: Any = partial(MultiNodeBatchNormalization, **options_and_group)
    make(1)  # raises for wrong arguments, even if the model has no batch normalization
    norms: list[L.BatchNormalization] = []
    requested = {k: v for k, v in options.items() if v != getattr(LinkOptions, k)}
    synchronized: dict[str, str] = {}  # by path: the options that differ from the requested ones
    obstacles = find_unsupported_norms(link)
    # The memo of the deep copy holds the new links, so that they replace the old ones in children,
    # Sequentials and any other attributes, and shared parameters stay shared.
    memo: dict[int, Any] = {}
    for path, child in link.namedlinks():
        # Do not copy communicators: some constructors are collective.
        memo |= {id(v): v for v in vars(child).values() if hasattr(type(v), "allreduce")}
        if isinstance(child, MultiNodeBatchNormalization):
            synchronized[path] = differing(vars(LinkOptions.of(child)), requested)
        if not isinstance(child, L.BatchNormalization):
            continue
        if names := overridden(type(child), lambda cls: cls is L.BatchNormalization):
            why = f"its class overrides {', '.join(names)}, which would be lost"
            obstacles[path] = f"{type(child).__module__}.{type(child).__qualname__}: {why}"
        else:
            norms.append(child)
    notes = {path: texts for path, texts in synchronized.items() if texts}
    warn(list_obstacles(notes, "link(s) are synchronized already and keep their own options"))
    consequence = "link(s) could not be converted, statistics will not be synchronized"
    message = list_obstacles(obstacles, consequence)
    if not (obstacles or norms):
        advice = "Its links are already synchronized." if synchronized else "Pass a model with one."
        message = f"`link` has no L.BatchNormalization: nothing is converted. {advice}"
    warn_or_raise(message, strict)
    check_sizes("link", norms)
    for old in norms:
        # The old link's parameters, if there are any, are copied with its attributes.
        kept: Any = {"decay": old.decay, "eps": old.eps, "axis": old.axis}
        new = make(old.avg_mean.shape, **kept, use_gamma=False, use_beta=False)
        memo[id(old)] = new
        new.__dict__.update(copy.deepcopy(old.__dict__, memo), axis=new.axis)
    return copy.deepcopy(link, memo)


def check_sizes(name: str, links: Iterable[Any]) -> None:
    """Raise ValueError if one of the `links`, from the argument `name`, has no size yet."""
    if any(link.avg_mean is None for link in links):
        raise ValueError(
            f"a batch normalization link in `{name}` is not initialized (size=None). Call the "
            "model once first."
        )


def find_unsupported_norms(model: chainer.Link) -> dict[str, str]:
    """Return the types of links that have moving averages but are no L.BatchNormalization."""
    kinds = MultiNodeBatchNormalization, L.BatchNormalization
    return {
        path: f"{type(link).__module__}.{type(link).__qualname__}: not an L.BatchNormalization"
        for path, link in model.namedlinks()
        if not isinstance(link, kinds) and any(map(is_running_statistic, link._persistent))
    }
