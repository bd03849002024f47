"""The steps between the passes for host memory, compiled by numba: one call each.

A step is dozens of operations on C numbers: one by one, they would take longer than the passes over
a small activation. Arrays without an address, and other dtypes, go to `generic`.
"""

from functools import cache
from typing import Any

from multibn.kernels import _loops, _step_loops


@cache
def step(name: str, dtype: str = "float64") -> Any:
    """The compiled loop of a step for parameters of `dtype`."""
    return _loops.compiled(_step_loops.LOOPS[name], dtype)
