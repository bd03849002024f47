"""Queries about arrays, faster than array_api_compat's, and copies to and from host memory."""

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat
import numpy as np
from array_api_compat import is_cupy_array, to_device

from multibn._typing import Array

_namespaces: dict[type, Any] = {}
_DLPACK_CPU = 1  # kDLCPU of dlpack.h


def is_torch_tensor(x: Any, /) -> bool:
    """Return whether `x` is a torch tensor.

    torch.compile traces this function, which therefore reads no cache, unlike array_api_compat's.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def array_namespace(x: Array, /) -> Any:
    """Return the array API namespace of `x`.

    Raises TypeError for masked arrays and matrices, and for a library without float64.
    """
    if is_torch_tensor(x):
        return sys.modules.get("array_api_compat.torch") or array_api_compat.array_namespace(x)
    namespace = _namespaces.get(type(x))
    if namespace is None:
        if isinstance(x, np.ma.MaskedArray | np.matrix):  # their arithmetic differs
            raise TypeError(
                f"the input must be a plain array: got {type(x).__qualname__}. Pass "
                "numpy.array(x) and, for a masked array, mask=~numpy.ma.getmaskarray(x), without "
                "the channel axis."
            )
        namespace = array_api_compat.array_namespace(x)
        _check_float64(namespace, type(x))
        _namespaces[type(x)] = namespace
    return namespace


def _check_float64(xp: Any, kind: type) -> None:
    """Raise TypeError without float64: sums in float32 would silently give wrong variances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns that it uses float32 instead
        given = xp.zeros(1, dtype=xp.float64).dtype if hasattr(xp, "float64") else None
    if given is None or given != xp.float64:
        raise TypeError(
            "the array library of the input must support float64: "
            f"{kind.__module__}.{kind.__qualname__} gives {given}. With JAX, set jax_enable_x64 "
            "first. NumPy, torch, CuPy and array-api-strict are tested."
        )


def device(x: Array, /) -> Any:
    """Return the device of `x`; "cpu" for NumPy before 2.0; None if JAX traces `x`."""
    # Not `np.ndarray | np.generic`, which torch.compile cannot trace.
    return getattr(x, "device", "cpu" if isinstance(x, (np.ndarray, np.generic)) else None)


def on_device_of(x: Any, /) -> AbstractContextManager[Any]:
    """Return a context that makes the GPU of a torch tensor current; otherwise a null context."""
    if is_torch_tensor(x) and x.is_cuda:
        return sys.modules["torch"].cuda.device_of(x)
    return nullcontext()


def is_on_host(x: Array, /) -> bool:
    """Return whether `x` is in host memory."""
    if isinstance(x, np.ndarray | np.generic):
        return True
    is_cpu = getattr(x, "is_cpu", None)  # torch only; faster than DLPack
    if is_cpu is not None:
        return bool(is_cpu)
    # A tracer of JAX has no device.
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == _DLPACK_CPU


def is_traced(x: Array, /) -> bool:
    """Return whether torch traces operations on `x` (make_fx, torch.func.linearize)."""
    if not is_torch_tensor(x):
        return False
    C = sys.modules["torch"]._C
    return C._get_dispatch_mode(C._TorchDispatchModeKey.PROXY) is not None


def is_abstract(x: Array, /) -> bool:
    """Return whether `x` is a torch tensor without data: on the meta device, or fake."""
    if not is_torch_tensor(x):
        return False
    subclasses = sys.modules["torch"]._subclasses
    kinds = subclasses.FakeTensor, subclasses.functional_tensor.FunctionalTensor
    return isinstance(x, kinds) or x.is_meta


def values(x: Array, /) -> Array:
    """Unwrap tensors of torch.func; a dimension of vmap becomes one more axis."""
    if is_torch_tensor(x):
        functorch = sys.modules["torch"]._C._functorch
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
    return x


def to_host(x: Array, /) -> np.ndarray[Any, Any]:
    """Return `x` as a contiguous NumPy array, which may share memory with `x`.

    16-bit types become float32: MPI has no half precision and NumPy no bfloat16.
    """
    if type(x) is np.ndarray:
        a = x
    elif is_torch_tensor(x):
        x = x.detach() if x.requires_grad else x
        x = (x if x.is_cpu else x.cpu()).resolve_conj().resolve_neg()
        if x.dtype.is_floating_point and x.dtype.itemsize < 4:
            x = x.float()
        a = x.numpy()
    elif is_cupy_array(x):
        a = x.get()
    else:
        a = np.asarray(x)
    if a.dtype == np.float16:
        a = a.astype(np.float32)
    # ascontiguousarray makes () into (1,)
    return a if a.flags.c_contiguous else np.ascontiguousarray(a).reshape(a.shape)


def from_host(a: np.ndarray[Any, Any], like: Array, /) -> Array:
    """Return `a` as an array of the library, dtype and device of `like`."""
    if isinstance(like, np.ndarray | np.generic):
        return a if a.dtype == like.dtype else a.astype(like.dtype)
    xp = array_namespace(like)
    if is_torch_tensor(like):
        t = xp.from_numpy(a)
        return t if t.dtype == like.dtype and like.is_cpu else t.to(like.device, like.dtype)
    return to_device(xp.asarray(a, dtype=like.dtype), device(like))
