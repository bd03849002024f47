"""Which ranks act on a model together."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator, as_communicator
from multibn.participants import largest
from multibn.torch_backend.modules import Synchronized


def participants(model: nn.Module, process_group: Any, /) -> Communicator:
    """The ranks that act on `model` together. Not collective.

    Those of `process_group`; where None is given, those of a DistributedDataParallel in the model,
    else the largest group of the model's synchronized layers, or torch's default process group if
    that is larger.

    Raises
    ------
    TypeError, ValueError
        As `multibn.as_communicator`; ValueError if this process would be alone although a launcher
        started several.
    """
    if process_group is not None:
        return as_communicator(process_group)
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            return as_communicator(module.process_group)
    groups = [module.process_group for module in modules if isinstance(module, Synchronized)]
    return largest([*groups, as_communicator()], parameter="process_group")
