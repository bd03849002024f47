"""DistributedDataParallel's own messages, which name no layer and have no deadline of multibn's.

Before a forward pass DistributedDataParallel broadcasts rank 0's buffers, and before its second one
it agrees on the order of the gradients. A lost or late rank would be met there first, as gloo's
"Connection closed by peer", or after the process group's timeout of 30 minutes. So the running
statistics that all ranks have in common are taken out of the broadcast; before what is left of
these messages, the ranks meet in one that has a deadline and names who is missing.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator, as_communicator
from multibn.communicators.base import identity
from multibn.communicators.conversation import Conversation

# Private parts of DistributedDataParallel, the same in torch 2.6 to 2.13. Where one is missing,
# DistributedDataParallel is left as it is.
_PRIVATE = (
    "_assign_modules_buffers",
    "_has_rebuilt_buckets",
    "modules_buffers",
    "parameters_to_ignore",
    "will_sync_module_buffers",
)

_meetings: WeakKeyDictionary[nn.Module, Communicator] = WeakKeyDictionary()


def watch_active(kind: type[nn.Module], /) -> None:
    """`watch` the DistributedDataParallel whose forward pass is running, if there is one."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and ddp not in _meetings:
        watch(ddp, kind)


def watch(ddp: Any, kind: type[nn.Module], /) -> None:
    """Let a message of multibn's be the first of every training forward pass of `ddp`.

    Not collective; every rank must call it before the same forward pass. `kind` is the class of the
    layers that share statistics.
    """
    group = as_communicator(ddp.process_group)
    meeting = Conversation(group, lambda: "DistributedDataParallel")
    _meetings.setdefault(ddp, meeting.during("before forward", torch.float64))
    if not all(hasattr(ddp, name) for name in _PRIVATE):
        return
    equal = {
        id(buffer)
        for layer in ddp.module.modules()
        if isinstance(layer, kind) and _has_equal_buffers(layer, group)
        for buffer in layer.buffers()
    }
    names = [name for name, buffer in ddp.module.named_buffers() if id(buffer) in equal]
    ddp.parameters_to_ignore = {*ddp.parameters_to_ignore, *names}
    ddp._assign_modules_buffers()
    device = next(ddp.parameters()).device.type
    # Other backends have no deadline here, and a watchdog of their own.
    is_gloo = f"{device}:gloo" in dist.get_backend_config(ddp.process_group).split(",")
    if is_gloo and _meet not in ddp._forward_pre_hooks.values():
        ddp.register_forward_pre_hook(_meet)


def _has_equal_buffers(layer: Any, group: Communicator) -> bool:
    """Whether the layer's running statistics are those of all ranks of `group`, on all of them."""
    # This convention multiplies the variance by n/(n-1) for n elements of the rank's own.
    is_local = layer.running_var_convention == "unbiased_local"
    return not is_local and identity(layer.process_group) == identity(group)


def _meet(ddp: Any, inputs: Any) -> None:
    """Wait for all ranks, if DistributedDataParallel is to communicate before the layers do."""
    if torch.compiler.is_compiling() or not (ddp.training and torch.is_grad_enabled()):
        return
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    if ddp.will_sync_module_buffers() or (rebuilds and not ddp._has_rebuilt_buckets):
        meeting = _meetings.get(ddp)
        if meeting is not None:  # `ddp` is no copy of one
            meeting.allreduce(torch.zeros(2, dtype=torch.float64))
