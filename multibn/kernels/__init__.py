"""Arithmetic on activations and per-channel arrays: one file per kind of array.

Each kernels file has five functions, the verbs: `begin_forward` and `begin_backward` before the
allreduce, `finish_forward` and `finish_backward` after it, and `normalize`, with known statistics.
`spec` defines the verbs' arguments. `reference`, with `steps`, defines what each verb computes, and
works for every library of the array API standard. `cpu` (NumPy arrays and torch tensors in host
memory), `cuda` (torch tensors on a GPU) and `cupy` (CuPy arrays, by `cuda`) compute the same
faster, if their compiler is installed, and fall back to `reference` for arrays and options that
they do not support. The fourth value that `begin_backward` returns, if any, is the last argument of
the same file's `finish_backward`. Nothing here communicates.
"""

import importlib
import os
import sys
from functools import cache
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array

from multibn._platform import how_to_build_core
from multibn._typing import Array
from multibn._warnings import warn
from multibn.kernels import reference as reference
from multibn.kernels.spec import BatchStatistics as BatchStatistics
from multibn.kernels.spec import Gradient as Gradient
from multibn.kernels.spec import NormArgs as NormArgs
from multibn.kernels.spec import Running as Running


def select(x: Array, /) -> Any:
    """Return the kernels file for arrays like `x`."""
    if type(x) is np.ndarray:
        return _native("cpu")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return reference
        if x.requires_grad and torch.is_grad_enabled():
            return reference  # autograd differentiates torch's own operations only
        return _native("cpu") if x.is_cpu else _native("cuda") if x.is_cuda else reference
    return _native("cupy") if is_cupy_array(x) else reference


def turned_off() -> bool:
    """Return whether MULTIBN_KERNELS disables the compiled kernels; ValueError if it is invalid."""
    asked = os.environ.get("MULTIBN_KERNELS", "")
    if asked not in ("", "reference"):
        raise ValueError(f"MULTIBN_KERNELS must be reference, or unset: got {asked!r}.")
    return asked == "reference"


@cache
def _native(name: str) -> Any:
    """Return the module `name`; `reference` if MULTIBN_KERNELS says so or the import fails.

    Warns once if the C core is missing, in the first step of a layer in host memory.
    """
    if turned_off():
        return reference
    try:
        file = importlib.import_module(f"multibn.kernels.{name}")
    except ImportError as error:
        if name == "cpu":
            warn(
                f"the C core is missing ({error}), so batch norm on the CPU is about three times "
                f"slower. {how_to_build_core()}; `multibn info` shows what is in use. Set "
                "MULTIBN_KERNELS=reference to silence this warning.",
                RuntimeWarning,
            )
        return reference
    # A module that does not know a field would silently ignore it.
    knows_all = all({*kind._fields} <= {*names} for kind, names in file.FIELDS.items())
    return file if knows_all else reference
