"""The private names of torch that the layers use. torch 2.10 to 2.13 have all of them.

Attributes whose values change are listed as strings, and a module that torch imports lazily is
looked up in `sys.modules`.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])

# A context in which all dispatch modes are disabled.
without_dispatch_modes = _disable_current_modes

# torch.func transforms; dispatch modes, make_fx's among them, which compiled code cannot query;
# torch.jit.trace; autocast for any device; tensors of `is_grads_batched`.
transforms_are_active = torch._C._are_functorch_transforms_active
get_dispatch_mode = torch._C._get_dispatch_mode
MAKE_FX = torch._C._TorchDispatchModeKey.PROXY
get_tracing_state = torch._C._get_tracing_state
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = _functorch.is_legacy_batchedtensor
# Not torch.nn.utils.vector_to_parameters, which overwrites the tensors.
flatten_dense_tensors = torch._utils._flatten_dense_tensors
unflatten_dense_tensors = torch._utils._unflatten_dense_tensors

# torch.compiler.disable, but the compiler is imported when the function is first called.
_disable_dynamo: Any = torch._disable_dynamo
# An attribute of torch.autograd.forward_ad: the nesting level, -1 without forward mode.
TANGENT_LEVEL = "_current_level"
# An attribute of torch.compiler: whether torch.export runs. In torch 2.11, `is_exporting()` is
# also true in torch.compile.
IS_EXPORTING = "_is_exporting_flag"
# Holds the default process group. None if torch is built without torch.distributed.
WORLD = getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def not_compiled(function: _Function) -> _Function:
    """Return `function`, excluded from torch.compile because it raises or communicates.

    A call does not import the compiler, which takes seconds.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(_Function, call)


def active_ddp() -> Any:
    """Return the DistributedDataParallel model whose forward pass is running, if any."""
    return DistributedDataParallel._active_ddp_module


def call_context() -> object:
    """Return a key for the state outside of a layer that a plan depends on: default group and DDP.

    In DDP's `join`, each result is unique, so that each call is validated.
    """
    ddp = DistributedDataParallel._active_ddp_module  # each call of a layer runs this
    world = None if WORLD is None else WORLD.default_pg  # can be destroyed and created again
    if ddp is None:  # weak references, so that a plan keeps neither alive; new ones compare unequal
        return None if world is None else ref(world)
    return object() if ddp._join_config.enable else (ref(ddp), world and ref(world))


def captures_cuda_graphs() -> bool:
    """Return whether inductor compiles for CUDA graphs, as in mode="reduce-overhead"."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def is_exporting_or_tracing() -> bool:
    """Return whether torch.export or torch.jit.trace runs; their programs may use F.batch_norm."""
    return getattr(torch.compiler, IS_EXPORTING) or torch.jit.is_tracing()
