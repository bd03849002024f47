"""The words that signatures share, and the checks of arguments that are numbers or such words.

All checks raise when an object is built, so that a mistake does not end a job hours later. Their
messages name the argument.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

# Any array of the array API standard: NumPy, torch, CuPy, array-api-strict... The standard has no
# type of its own that a checker could hold the libraries to.
Array: TypeAlias = Any
HostArray: TypeAlias = np.ndarray[Any, Any]

Weighting: TypeAlias = Literal["element", "sample", "rank"]
RunningVar: TypeAlias = Literal["unbiased_global", "unbiased_local", "biased"]
# The answer of a layer to a batch that is not finite. None: "skip" for float16, else "raise".
Nonfinite: TypeAlias = Literal["raise", "skip", None]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless `value` is one of `choices`, a Literal."""
    if value not in get_args(choices):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(choices)))}: got {value!r}."
        )


def check_bool(**values: object) -> None:
    """Raise TypeError unless each value is a bool, or 0 or 1: "no" would count as true."""
    for name, value in values.items():
        if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
            raise TypeError(
                f"`{name}` must be a bool: got {value!r} of type {type(value).__qualname__}."
            )


def check_int(name: str, value: Any, least: int | None = 1, *, none: str = "") -> None:
    """Raise TypeError unless `value` is an int, not a bool; ValueError if it is below `least`.

    If `none` is given, None is allowed, and the message explains None with this text.
    """
    _check_type(name, value, Integral, "an int", none)
    if least is not None and value is not None and value < least:
        wanted = {0: "0 or more", 1: "positive"}.get(least, f"{least} or more")
        raise ValueError(f"`{name}` must be {wanted}{_or_none(none)}: got {value!r}.")


def check_ints(name: str, values: Iterable[object], least: int | None = 1) -> None:
    """`check_int` of each of several values."""
    for value in values:
        check_int(name, value, least)


def check_number(name: str, value: Any, interval: str, *, none: str = "") -> None:
    """Raise TypeError unless `value` is a real number; ValueError outside of `interval`, or NaN.

    The interval is such as "[0, 1)"; "(0, inf)" stands for positive and finite numbers. `none` is
    as for `check_int`.
    """
    _check_type(name, value, Real, "a number", none)
    low, high = map(float, interval[1:-1].split(","))
    inside = value is None or (
        (low <= value if interval[0] == "[" else low < value)
        and (value <= high if interval[-1] == "]" else value < high)
    )
    if not inside:
        wanted = "positive and finite" if interval == "(0, inf)" else f"in {interval}"
        raise ValueError(f"`{name}` must be {wanted}{_or_none(none)}: got {value!r}.")


def check_eps(value: Any, /, name: str = "eps") -> None:
    """Raise as `check_number` below 1.18e-38, the smallest normal number of float32.

    Below 1e-77, the inverse standard deviation of a channel of equal values is infinite in float32,
    and NaN comes out; subnormal numbers are 0 on some devices.
    """
    check_number(name, value, "[1.18e-38, inf)")


def check_residual(residual: Any, x: Array, kinds: Any, words: str) -> None:
    """Raise unless `residual` is of `kinds`, in words, and has the shape and dtype of `x`."""
    if not isinstance(residual, kinds):
        raise TypeError(f"`residual` must be {words}: got {type(residual).__qualname__}.")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"`residual` must have the shape and dtype of the input, {tuple(x.shape)} and "
            f"{x.dtype}: got {tuple(residual.shape)} and {residual.dtype}. Pass masks and "
            "lengths by keyword: `mask=`, `lengths=`."
        )


# Of a class statement, or of the constructor: no call of a layer reads these.
_HARMLESS = {
    *("__abstractmethods__", "__annotations__", "__doc__", "__firstlineno__", "__init__"),
    *("__module__", "__static_attributes__", "_abc_impl"),
    "__slotnames__",  # copy and pickle keep it in a class
}


def overridden(cls: type, is_base: Callable[[type], bool], /, *harmless: str) -> list[str]:
    """The names by which `cls` may behave unlike its first base class for which `is_base` is true.

    `harmless` are further names that change nothing.
    """
    derived = takewhile(lambda other: not is_base(other), cls.__mro__)
    return sorted({name for other in derived for name in vars(other)} - _HARMLESS - {*harmless})


def list_obstacles(obstacles: dict[str, str], consequence: str) -> str:
    """One message for all `obstacles`, which maps paths of layers to reasons."""
    parts = []
    for why in dict.fromkeys(obstacles.values()):
        paths = [path or "the model itself" for path, other in obstacles.items() if other == why]
        if len(paths) > 4:
            paths[3:] = [f"and {len(paths) - 3} more"]
        parts.append(f"{', '.join(paths)} ({why})".replace(", and", " and"))
    return f"{len(obstacles)} {consequence}: {'; '.join(parts)}."


def _check_type(name: str, value: object, kind: type, words: str, none: str) -> None:
    """Raise TypeError unless `value` is of type `kind`, or None where None has a meaning."""
    if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and none)):
        raise TypeError(
            f"`{name}` must be {words}{_or_none(none)}: got {value!r} of type "
            f"{type(value).__qualname__}."
        )


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
