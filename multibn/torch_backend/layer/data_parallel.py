"""Deadlines for DistributedDataParallel's own messages, which have none and name no layer.

DistributedDataParallel (DDP) broadcasts rank 0's buffers before a forward pass, and agrees on the
order of the gradients before its second one. A lost or late rank would appear there first, as
gloo's "Connection closed by peer", or after the process group's timeout of 30 minutes. So multibn
takes the running statistics that are equal on all ranks out of the broadcast. Before DDP's other
messages, multibn sends a message with a deadline, whose error names the missing rank.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator, as_communicator
from multibn.communicators.communicator import identity
from multibn.communicators.layer_communicator import LayerCommunicator, during
from multibn.torch_backend._torch_private import ACTIVE_DDP, DDP_ATTRIBUTES

# Parts of DDP that its documentation does not name. If one is missing, DDP stays as it is.
_PRIVATE_DDP_ATTRIBUTES = *DDP_ATTRIBUTES, "parameters_to_ignore", "will_sync_module_buffers"

_ddp_communicators: WeakKeyDictionary[nn.Module, Communicator] = WeakKeyDictionary()


def watch_active() -> None:
    """`patch_ddp` the DDP whose forward pass is running, if any."""
    ddp = getattr(DistributedDataParallel, ACTIVE_DDP, None)
    if ddp is not None and ddp not in _ddp_communicators:
        patch_ddp(ddp)


def patch_ddp(ddp: Any, /) -> None:
    """Make a message of multibn's the first of every training forward pass of `ddp`.

    Not collective; every rank must call it before the same forward pass.
    """
    group = as_communicator(ddp.process_group)
    _ddp_communicators.setdefault(ddp, LayerCommunicator(group, lambda: "DistributedDataParallel"))
    if not all(hasattr(ddp, name) for name in _PRIVATE_DDP_ATTRIBUTES):
        return
    # "unbiased_local" multiplies the variance by n/(n-1), where n counts this rank's elements only.
    equal = {
        id(buffer)
        for layer in ddp.module.modules()
        if getattr(layer, "running_var_convention", "unbiased_local") != "unbiased_local"
        and identity(layer.layer_communicator.communicator) == identity(group)
        for buffer in layer.buffers()
    }
    names = [name for name, buffer in ddp.module.named_buffers() if id(buffer) in equal]
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *names}
    ddp._assign_modules_buffers()
    device = next(ddp.parameters()).device.type
    # Of DDP's backends only gloo has multibn's deadline; NCCL has a watchdog of its own.
    is_gloo = f"{device}:gloo" in dist.get_backend_config(ddp.process_group).split(",")
    if is_gloo and _barrier_pre_hook not in ddp._forward_pre_hooks.values():
        ddp.register_forward_pre_hook(_barrier_pre_hook)


def _barrier_pre_hook(ddp: Any, inputs: Any) -> None:
    """Wait for all ranks if DDP will communicate before the layers do."""
    if torch.compiler.is_compiling() or not (ddp.training and torch.is_grad_enabled()):
        return
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    if ddp.will_sync_module_buffers() or (rebuilds and not ddp._has_rebuilt_buckets):
        meeting = _ddp_communicators.get(ddp)
        if meeting is not None:  # a copy of a watched DDP has the hook and no meeting
            numbers = torch.zeros(2, dtype=torch.float64, device="cpu")
            during(meeting, "before forward", numbers.dtype, len(numbers)).allreduce(numbers)
