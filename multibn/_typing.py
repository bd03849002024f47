"""The words that signatures of the engine share."""

from typing import Any, Literal, TypeAlias, get_args

# Any array of the array API standard: NumPy, torch, CuPy, array-api-strict... The standard has no
# type of its own that a checker could hold the libraries to.
Array: TypeAlias = Any

Weighting: TypeAlias = Literal["element", "sample", "rank"]
RunningVar: TypeAlias = Literal["unbiased_global", "unbiased_local", "biased"]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless `value` is one of `choices`, a Literal."""
    if value not in get_args(choices):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(choices)))}: got {value!r}."
        )
