"""Exclude shared running statistics from the buffers that DistributedDataParallel broadcasts.

DistributedDataParallel (DDP) broadcasts rank 0's buffers before each training forward pass.
Statistics that are equal on all ranks need no broadcast. Without the broadcast, one rank can run
validation alone through the DDP model. If a rank is lost or late, the first collective to wait is
a layer's, whose error names this rank.
"""

from typing import Any
from weakref import WeakSet

from torch import nn

from multibn.communicators import as_communicator
from multibn.communicators.communicator import identity

#: The models that `patch_ddp` has changed.
patched: WeakSet[nn.Module] = WeakSet()


def patch_ddp(ddp: Any, /) -> None:
    """Exclude running statistics that all ranks of `ddp` share from its broadcast.

    Not collective; every rank must call it before the same forward pass.
    """
    patched.add(ddp)
    group = as_communicator(ddp.process_group)
    # "unbiased_local" multiplies the variance by n/(n-1), where n counts this rank's elements only.
    shared = {
        id(buffer)
        for layer in ddp.module.modules()
        if getattr(layer, "running_var_convention", "unbiased_local") != "unbiased_local"
        and identity(layer.layer_communicator.communicator) == identity(group)
        for buffer in layer.buffers()
    }
    names = [name for name, buffer in ddp.module.named_buffers() if id(buffer) in shared]
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *names}
    ddp._assign_modules_buffers()
