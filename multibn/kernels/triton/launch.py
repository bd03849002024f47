"""Launches of Triton kernels, in a few microseconds."""

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from multibn._warnings import warn


def number(v: Any) -> Any:
    """Return the kernel argument for `v`: a tensor itself, of a number its float64 bits.

    Triton would pass a float in float32, and an integer 0 in 32 bits, so -0.0 replaces 0.
    """
    return v if isinstance(v, torch.Tensor) else _bits(v)


@lru_cache(maxsize=1024)
def _bits(v: float) -> int:
    return _INT64.unpack(_FLOAT64.pack(v or -0.0))[0]


def require_launcher() -> None:
    """Raise ImportError, with a warning, if Triton does not support the machine or its GPU."""
    try:
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "cuda" and target.arch < 70:
            raise RuntimeError(f"the GPU has compute capability {target.arch / 10}, below 7.0.")
    except Exception as error:  # Triton's, or the C compiler's
        warn(
            f"Triton is not usable here ({error}), so layers fall back to slower torch "
            "operations. If a compiler is missing, install a C compiler and Python's headers, on "
            "Debian gcc and python3-dev.",
            RuntimeWarning,
        )
        raise ImportError("Triton cannot launch kernels") from error


class Launched(NamedTuple):
    """A launch that was made, and what Triton compiled for it; None in Triton's interpreter."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Any

    def named(self) -> dict[str, Any]:
        """Return the arguments by the names of the kernel's parameters."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))


class _Thread(threading.local):
    launched: list[Launched] | None = None


@contextmanager
def collecting() -> Iterator[list[Launched]]:
    """Yield a list of the launches that this thread makes inside the context."""
    outer, _thread.launched = _thread.launched, []
    try:
        yield _thread.launched
    finally:
        _thread.launched = outer


def launch(
    kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], key: Any, known: Any
) -> None:
    """Launch a kernel on the device of its first argument; `num_warps` and so on are constants.

    Triton takes 14 us to inspect the arguments of a launch. So `known` caches what was compiled for
    a `key`, which the caller makes of all that can change: dtypes, and which arguments are None.
    These kernels specialize on no number. If an argument that must be aligned is not, the key is
    None, and Triton inspects the arguments.
    """
    device = arguments[0].get_device()
    if device != current_device():
        with torch.cuda.device_of(arguments[0]):
            launch(kernel, programs, arguments, constants, key, known)
        return
    found = known.get((device, key))
    if found is not None and not hooks.calls:
        compiled, run, stream_of, function, metadata, values = found
        stream = stream_of(device)
        # Neither metadata of the launch nor hooks.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *values)
    else:
        compiled = kernel[programs,](*arguments, **constants)
        if compiled is not None and key is not None:  # Triton's interpreter compiles nothing
            values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            stream_of = triton.runtime.driver.active.get_current_stream
            launcher = compiled.run, stream_of, compiled.function, compiled.packed_metadata
            known[device, key] = compiled, *launcher, values
    if _thread.launched is not None:
        _thread.launched.append(Launched(kernel, programs, arguments, constants, compiled))


_INT64, _FLOAT64 = struct.Struct("=q"), struct.Struct("=d")
hooks: Any = knobs.runtime.launch_enter_hook  # profilers set some
_thread = _Thread()
current_device: Any = lambda: -1  # noqa: E731 (of host memory, in Triton's interpreter)
current_stream: Any = lambda device: 0  # noqa: E731
if torch.cuda.is_available():  # a torch built for GPUs has the functions elsewhere, too
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
