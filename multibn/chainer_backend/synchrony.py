"""Whether the ranks' models are still the same."""

from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from multibn.chainer_backend.participants import participants
from multibn.synchrony import check_equal


def check_sync(model: chainer.Link, comm: Any = None, *, ignore: Iterable[str] = ()) -> None:
    """Raise on all ranks unless they hold the same model, bit for bit.

    Collective: every rank must call it, with one allreduce of 32 numbers if all is well, whatever
    the size of the model. Copies the model to host memory, so call it once an epoch rather than in
    every step.

    Parameters
    ----------
    model
        Its parameters and persistent values are compared, under names as `"/bn/avg_mean"`. What is
        no array or number is left out.
    comm
        The ranks that are compared, anything that `multibn.as_communicator` takes. Default: the
        largest group of the model's multi-node links.
    ignore
        Names to leave out, with wildcards: `["*/avg_*"]` for batch normalization that does not
        share statistics.

    Raises
    ------
    ValueError
        If `comm` is None and a launcher started several processes, but the model's links tell of
        none other than this one.
    RuntimeError
        On all ranks: with the names, ranks and largest differences from rank 0, if values differ;
        with what is there and what is missing, if the models are not built alike.
    """
    arrays = {name: parameter.array for name, parameter in model.namedparams()}
    for path, link in model.namedlinks():
        for name in link._persistent:
            value = link.__dict__[name]
            if np.isscalar(value) and not isinstance(value, str):
                value = np.asarray(value)
            if value is None or isinstance(value, chainer.get_array_types()):
                arrays[f"{path.rstrip('/')}/{name}"] = value
    check_equal(arrays, participants(model, comm), ignore=ignore)
