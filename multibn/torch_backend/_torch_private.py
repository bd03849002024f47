"""The private names of torch that the layers use; torch 2.10 to 2.13 have every one.

Three are attributes of torch's own objects, whose values change, and stand here as names, as does a
module that torch loads when it needs the module.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])

# A context in which no dispatch mode sees an operation.
without_dispatch_modes = _disable_current_modes

# Whether torch.func transforms this call; the dispatch modes, make_fx's among them, which compiled
# code cannot ask for; torch.jit's trace; autocast; the tensors of `is_grads_batched`.
transforms_are_active = torch._C._are_functorch_transforms_active
get_dispatch_mode = torch._C._get_dispatch_mode
MAKE_FX = torch._C._TorchDispatchModeKey.PROXY
get_tracing_state = torch._C._get_tracing_state
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = _functorch.is_legacy_batchedtensor
# torch.nn.utils has the like for parameters, of one dtype.
flatten_dense_tensors = torch._utils._flatten_dense_tensors
unflatten_dense_tensors = torch._utils._unflatten_dense_tensors

# torch.compiler.disable, which imports torch's compiler only when the function is called.
_disable_dynamo: Any = torch._disable_dynamo
# torch.autograd.forward_ad's: how deep forward mode is, -1 outside of it.
TANGENT_LEVEL = "_current_level"
# torch.compiler's: whether torch.export runs. `is_exporting()` of torch 2.11 is true in
# torch.compile, too.
IS_EXPORTING = "_is_exporting_flag"
# A private method of DistributedDataParallel; without it, DDP is not patched.
ASSIGN_BUFFERS = "_assign_modules_buffers"
# torch.distributed's, with the default process group; None where torch has no torch.distributed.
WORLD = getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def not_compiled(function: _Function) -> _Function:
    """Return `function`, which compiled code calls and does not trace: it raises, or sums."""
    return cast(_Function, _disable_dynamo(function))


def active_ddp() -> Any:
    """Return the DistributedDataParallel model whose forward pass is running, if any.

    Without the attribute, in another version of torch, DDP's `join` is not recognized, and its
    broadcasts stay as they are.
    """
    try:
        return DistributedDataParallel._active_ddp_module
    except AttributeError:
        return None


def call_context() -> object:
    """Return what a plan depends on beside a layer and its input: the default group, and DDP.

    Inside of DDP's `join` the result equals no other one, so that each call is validated.
    """
    try:  # not by `active_ddp`: each call of a layer comes here
        ddp = DistributedDataParallel._active_ddp_module
    except AttributeError:
        ddp = None
    world = None if WORLD is None else WORLD.default_pg  # may be made anew
    if ddp is None:  # weak: a plan keeps neither alive, and another one in their place is not equal
        return None if world is None else ref(world)
    return object() if ddp._join_config.enable else (ref(ddp), world and ref(world))


def captures_cuda_graphs() -> bool:
    """Return whether inductor compiles for CUDA graphs now, as for mode="reduce-overhead"."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def is_exporting_or_tracing() -> bool:
    """Return whether torch.export or torch.jit.trace runs: both can hold torch's batch norm."""
    return getattr(torch.compiler, IS_EXPORTING) or torch.jit.is_tracing()
