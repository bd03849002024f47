"""The verbs for CuPy arrays, whose memory torch shares: `cuda` computes.

Torch launches in CuPy's current stream. So torch's kernels run after the CuPy kernels that wrote
their inputs, and before CuPy reads their outputs or reuses the memory of freed arrays.
"""

from collections.abc import Callable
from typing import Any

import cupy
import torch

from multibn.kernels import cuda
from multibn.kernels.steps import parameter_gradients as parameter_gradients

if not torch.cuda.is_available():
    raise ImportError("this torch has no GPU")


def _on_cupy(verb: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, out: None = None) -> Any:
        # A plan passes `out` only for torch's tensors.
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            results = verb(*_mapped(arguments, cupy.ndarray, torch.from_dlpack))
            return _mapped(results, torch.Tensor, cupy.from_dlpack)

    return call


def _mapped(v: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return `v`, perhaps nested tuples, with all arrays of one kind converted without a copy."""
    if isinstance(v, kind):
        return convert(v)
    if not isinstance(v, tuple):
        return v
    values = [_mapped(each, kind, convert) for each in v]
    return type(v)(*values) if hasattr(v, "_fields") else tuple(values)


begin_forward, finish_forward = _on_cupy(cuda.begin_forward), _on_cupy(cuda.finish_forward)
begin_backward, finish_backward = _on_cupy(cuda.begin_backward), _on_cupy(cuda.finish_backward)
FIELDS = cuda.FIELDS
normalize = _on_cupy(cuda.normalize)
