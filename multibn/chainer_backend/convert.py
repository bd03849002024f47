"""Exchange the batch normalization links of a model for multi-node ones."""

import copy
import warnings
from typing import Any

import chainer
from chainer import links as L

from multibn.chainer_backend.links import MultiNodeBatchNormalization


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
        For a link derived from L.BatchNormalization with a forward pass of its own, such as
        L.BatchRenormalization: it is copied as it is.
    """
    done: dict[int, chainer.Link] = {}

    def visit(old: chainer.Link) -> chainer.Link:
        if id(old) not in done:
            done[id(old)] = new = _exchange(old, comm, communication_backend)
            if isinstance(new, chainer.Chain):
                for name in new._children:
                    new.__dict__[name] = visit(new.__dict__[name])
            elif isinstance(new, chainer.ChainList):
                new._children[:] = [visit(child) for child in new._children]
            # A Sequential also keeps functions, and its links a second time.
            if isinstance(new, chainer.Sequential):
                new._layers[:] = [
                    visit(layer) if isinstance(layer, chainer.Link) else layer
                    for layer in new._layers
                ]
        return done[id(old)]

    return visit(copy.deepcopy(link))


def _exchange(link: chainer.Link, comm: Any, communication_backend: str) -> chainer.Link:
    if not isinstance(link, L.BatchNormalization):
        return link
    if type(link).forward is not L.BatchNormalization.forward:
        warnings.warn(
            f"{type(link).__module__}.{type(link).__qualname__} is copied as it is, its statistics "
            "stay local: the class has a forward pass of its own, which conversion would drop.",
            stacklevel=4,
        )
        return link
    new = MultiNodeBatchNormalization(
        None if link.avg_mean is None else link.avg_mean.shape,
        comm,
        link.decay,
        link.eps,
        link._highprec_dtype,
        use_gamma=False,
        use_beta=False,
        communication_backend=communication_backend,
        axis=link.axis,
    )
    new.name = link.name
    new.to_device(link.device)
    with new.init_scope():  # the very parameters of the copy, which other links may share
        for name in ("gamma", "beta"):
            if getattr(link, name) is not None:
                setattr(new, name, getattr(link, name))
    for name in ("N", "avg_mean", "avg_var"):
        setattr(new, name, getattr(link, name))
    if link.avg_mean is None:
        initial_mean, initial_var = link._initial_avg_mean, link._initial_avg_var
        new._initial_averages = (
            0 if initial_mean is None else initial_mean,
            1 if initial_var is None else initial_var,
        )
    return new
