"""Exchange the batch normalization links of a model for multi-node ones."""

import copy
import itertools
import warnings
from typing import Any

import chainer
from chainer import links as L

from multibn.chainer_backend.links import MultiNodeBatchNormalization

# What a class may define and still behave like L.BatchNormalization.
_HARMLESS = {
    "__annotations__",
    "__doc__",
    "__firstlineno__",
    "__init__",
    "__module__",
    "__static_attributes__",
}


def create_mnbn_model(
    link: chainer.Link, comm: Any, communication_backend: str = "auto"
) -> chainer.Link:
    """A copy of a model in which every L.BatchNormalization is a `MultiNodeBatchNormalization`.

    Takes the place of chainermn.links.create_mnbn_model. The copy has nothing in common with
    `link`; what is shared inside `link`, parameters or whole links, is shared inside the copy.
    Parameters, moving averages, `axis`, `decay` and `eps` carry over. Not collective.

    Parameters
    ----------
    link
        A Chain, ChainList, Sequential, or a bare link.
    comm, communication_backend
        As `MultiNodeBatchNormalization`'s.

    Warns
    -----
    UserWarning
        For a link whose class overrides more of L.BatchNormalization than its constructor, such as
        L.BatchRenormalization: it is copied as it is.
    """
    # A deep copy that finds a new link in the memo wherever the old one stands: as a child, as a
    # layer of a Sequential, or in any other attribute.
    memo: dict[int, Any] = {}
    for old in link.links():
        if isinstance(old, L.BatchNormalization) and not _obstructed(old):
            memo[id(old)] = _convert(old, comm, communication_backend, memo)
    return copy.deepcopy(link, memo)


def _obstructed(link: L.BatchNormalization) -> bool:
    """Warn and return True if the link's class is more than L.BatchNormalization."""
    cls = type(link)
    derived = itertools.takewhile(lambda base: base is not L.BatchNormalization, cls.__mro__)
    overridden = sorted({name for base in derived for name in vars(base)} - _HARMLESS)
    if not overridden:
        return False
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} is copied as it is, its statistics stay local: its "
        f"class overrides {', '.join(overridden)}, which would be lost.",
        stacklevel=3,
    )
    return True


def _convert(
    old: L.BatchNormalization, comm: Any, communication_backend: str, memo: dict[int, Any]
) -> MultiNodeBatchNormalization:
    new = MultiNodeBatchNormalization(
        None if old.avg_mean is None else old.avg_mean.shape,
        comm,
        dtype=old._highprec_dtype,
        communication_backend=communication_backend,
        axis=old.axis,
    )
    # Everything that the old link has, hooks included; the memo keeps shared parameters shared.
    new.__dict__.update(copy.deepcopy(old.__dict__, memo))
    if old.avg_mean is None:  # a lazy link has its initial averages still to come
        new._initial_averages = (
            0 if old._initial_avg_mean is None else old._initial_avg_mean,
            1 if old._initial_avg_var is None else old._initial_avg_var,
        )
    return new
