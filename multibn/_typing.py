"""The words that signatures of the engine share."""

from typing import Any, Literal, TypeAlias

# Any array of the array API standard: NumPy, torch, CuPy, array-api-strict... The standard has no
# type of its own that a checker could hold the libraries to.
Array: TypeAlias = Any

Weighting: TypeAlias = Literal["element", "sample", "rank"]
RunningVar: TypeAlias = Literal["unbiased_global", "unbiased_local", "biased"]
