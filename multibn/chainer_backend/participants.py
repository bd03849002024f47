"""Which ranks act on a model together."""

from typing import Any

import chainer

from multibn.chainer_backend.links import MultiNodeBatchNormalization
from multibn.communicators import Communicator, as_communicator
from multibn.participants import largest


def participants(model: chainer.Link, comm: Any, /) -> Communicator:
    """The ranks that act on `model` together. Not collective.

    Those of `comm`; where None is given, the largest group of the model's multi-node links; of a
    model without such links, torch's default process group where one is initialised.

    Raises
    ------
    TypeError, ValueError
        As `multibn.as_communicator`; ValueError if this process would be alone although a launcher
        started several.
    """
    if comm is not None:
        return as_communicator(comm)
    links = [link for link in model.links() if isinstance(link, MultiNodeBatchNormalization)]
    groups = [link._communicator for link in links] or [as_communicator()]
    return largest(groups, parameter="comm")
