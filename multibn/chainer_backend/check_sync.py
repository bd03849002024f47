"""Check that all ranks hold the same model, and find the communicator of a model."""

from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization, check_link
from multibn.communicators import Communicator, CommunicatorLike, as_communicator
from multibn.engine.consistency import check_equal, common_group


def participants(model: chainer.Link, comm: CommunicatorLike, /) -> Communicator:
    """Return `comm` as a Communicator; None means the default of `check_sync`. Not collective."""
    if comm is not None:
        return as_communicator(comm)
    groups = {path: link.layer_communicator.communicator for path, link in _multi_node(model)}
    return common_group(groups, parameter="comm")


def check_sync(
    model: chainer.Link, comm: CommunicatorLike = None, *, ignore: Iterable[str] = ()
) -> None:
    """Raise on all ranks unless they hold the same model, bit for bit, with the same options.

    Collective: every rank must call check_sync. Equal models cost three small allreduces, and a
    copy of the model to host memory: call check_sync before saving or once per epoch.

    Parameters
    ----------
    model
        The model. Its parameters and persistent values (arrays, numbers, strings, and sequences of
        these) are compared by name, for example `"/bn/avg_mean"`.
    comm
        The ranks to compare: anything that `multibn.as_communicator` accepts. Default: the group
        that all multi-node links of the model share, which may be `multibn.SingleProcess()` (of a
        `multibn.Group`, its parent); if there is no such link, torch's default process group.
    ignore
        A pattern of names to leave out, or several: `["*/avg_*"]` for batch normalization that
        does not share statistics.

    Raises
    ------
    ValueError
        If `comm` is None and the model's links have different groups; or if a launcher started
        several processes, but neither a link nor torch.distributed has a group.
    TypeError
        If a persistent value has another type. The other ranks then raise RuntimeError.
    RuntimeError
        On all ranks, if the models differ. For different values, the message lists names, ranks and
        the largest differences from the majority of the ranks; for different structures, additional
        and missing names.

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
    options = {path.rstrip("/"): vars(LinkOptions.of(link)) for path, link in _multi_node(model)}
    check_equal(
        arrays,
        participants(model, comm),
        parameters=parameters,
        statistics=statistics,
        options=options,
        ignore=ignore,
    )


def _multi_node(model: chainer.Link) -> list[tuple[str, MultiNodeBatchNormalization]]:
    return [(k, v) for k, v in model.namedlinks() if isinstance(v, MultiNodeBatchNormalization)]


def _as_array(value: Any) -> Any:
    """Return a persistent value as serializers store it; `check_equal` rejects Python objects."""
    try:
        return np.asarray(value)
    except ValueError:  # a sequence whose items differ in length
        return np.asarray(None)
