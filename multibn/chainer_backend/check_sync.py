"""Equal models on all ranks: a check, and the ranks that act on a model together."""

from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization, check_link
from multibn.communicators import Communicator, CommunicatorLike, as_communicator
from multibn.engine.consistency import check_equal, common_group


def participants(model: chainer.Link, comm: CommunicatorLike, /) -> Communicator:
    """The ranks of `comm`, or of the model by the rule of `check_sync`. Not collective."""
    if comm is not None:
        return as_communicator(comm)
    groups = {
        path: link.layer_communicator.communicator
        for path, link in model.namedlinks()
        if isinstance(link, MultiNodeBatchNormalization)
    }
    return common_group(groups, parameter="comm")


def check_sync(
    model: chainer.Link, comm: CommunicatorLike = None, *, ignore: Iterable[str] = ()
) -> None:
    """Raise on all ranks unless they hold the same model, bit for bit, with the same options.

    Collective: every rank must call it, with three small allreduces if all models are equal.
    Call it before saving, or once an epoch: it copies the model to host memory.

    Parameters
    ----------
    model
        Parameters and persistent values are compared, under names as `"/bn/avg_mean"`: arrays,
        numbers, strings, and sequences of these.
    comm
        The ranks to compare, anything that `multibn.as_communicator` takes. Default: the group that
        was given to all multi-node links of the model, `multibn.SingleProcess()` included, where a
        `multibn.Group` counts as its parent; else torch's default process group.
    ignore
        A pattern of names to leave out, or several: `["*/avg_*"]` for batch normalization that
        does not share statistics.

    Raises
    ------
    ValueError
        If `comm` is None and the model's links were given unlike groups; or if a launcher started
        several processes, but neither a link nor torch.distributed has a group.
    TypeError
        If a value is none of these. RuntimeError then on the other ranks.
    RuntimeError
        On all ranks. If values differ, the message has names, ranks and largest differences from
        rank 0; if the models are built differently, the additional and the missing names.

    Examples
    --------
    >>> from chainer import links as L
    >>> from multibn.chainer import check_sync
    >>> check_sync(L.BatchNormalization(8), ignore=["*/avg_*"])  # passes on one rank
    """
    check_link("model", model)
    arrays = {name: parameter.array for name, parameter in model.namedparams()}
    parameters, statistics = set(arrays), set()
    for path, link in model.namedlinks():
        for name in link._persistent:
            value, key = link.__dict__[name], f"{path.rstrip('/')}/{name}"
            is_array = value is None or isinstance(value, chainer.get_array_types())
            arrays[key] = value if is_array else _as_array(value)
            if hasattr(link, "avg_var"):
                statistics.add(key)
    options = {
        path.rstrip("/"): vars(LinkOptions.of(link))
        for path, link in model.namedlinks()
        if isinstance(link, MultiNodeBatchNormalization)
    }
    check_equal(
        arrays,
        participants(model, comm),
        parameters=parameters,
        statistics=statistics,
        options=options,
        ignore=ignore,
    )


def _as_array(value: Any) -> Any:
    """A persistent value as Chainer's serializers store it; one of objects is refused."""
    try:
        return np.asarray(value)
    except ValueError:  # a sequence whose items differ in length
        return np.asarray(None)
