"""Type aliases of signatures, and checks of arguments.

Constructors call these checks, so that a mistake does not end a job hours later. Error messages
name the argument.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

# Any array of the array API standard: NumPy, torch, CuPy, array-api-strict... The standard defines
# no type for a type checker.
Array: TypeAlias = Any
HostArray: TypeAlias = np.ndarray[Any, Any]

Weighting: TypeAlias = Literal["element", "sample", "rank"]
RunningVar: TypeAlias = Literal["unbiased_global", "unbiased_local", "biased"]
# What a layer does with a non-finite batch. None: "skip" for float16, otherwise "raise".
Nonfinite: TypeAlias = Literal["raise", "skip", None]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless `value` is one of `choices`, a Literal."""
    if value not in get_args(choices):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(choices)))}: got {value!r}."
        )


def check_bool(**values: object) -> None:
    """Raise TypeError unless each value is a bool, 0 or 1; the string "no" would be true."""
    for name, value in values.items():
        if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
            raise TypeError(
                f"`{name}` must be a bool: got {value!r} of type {type(value).__qualname__}."
            )


def check_int(name: str, value: Any, least: int | None = 1, *, none: str = "") -> None:
    """Raise TypeError unless `value` is an int and not a bool; ValueError below `least`.

    If `none` is given, None is allowed, and `none` is the meaning of None in the message.
    """
    _check_type(name, value, Integral, "an int", none)
    if least is not None and value is not None and value < least:
        wanted = {0: "0 or more", 1: "positive"}.get(least, f"{least} or more")
        raise ValueError(f"`{name}` must be {wanted}{_or_none(none)}: got {value!r}.")


def check_ints(name: str, values: Iterable[object], least: int | None = 1) -> None:
    """Call `check_int` for each value."""
    for value in values:
        check_int(name, value, least)


def check_number(name: str, value: Any, interval: str, *, none: str = "") -> None:
    """Raise TypeError unless `value` is a real number; ValueError for NaN or outside `interval`.

    `interval` is a string, "[0, 1)" for example; "(0, inf)" is positive and finite. See `check_int`
    for `none`.
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
    """Raise as `check_number` does if `value` is below the smallest normal float32, 1.18e-38.

    Below 1e-77, a channel of equal values has an infinite inverse standard deviation in float32,
    and its output is NaN. Subnormal numbers are 0 on some devices.
    """
    check_number(name, value, "[1.18e-38, inf)")


def check_residual(residual: Any, x: Array, types: Any, expected: str) -> None:
    """Raise unless `residual` has one of `types`, described by `expected`, and matches `x`."""
    if not isinstance(residual, types):
        raise TypeError(f"`residual` must be {expected}: got {type(residual).__qualname__}.")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"`residual` must have the shape and dtype of the input, {tuple(x.shape)} and "
            f"{x.dtype}: got {tuple(residual.shape)} and {residual.dtype}. Pass masks and "
            "lengths by keyword: `mask=`, `lengths=`."
        )


# A class statement or the constructor sets these; no call of a layer reads them.
_HARMLESS = {
    *("__abstractmethods__", "__annotations__", "__doc__", "__firstlineno__", "__init__"),
    *("__module__", "__static_attributes__", "_abc_impl"),
    "__slotnames__",  # copy and pickle cache this in a class
}


def overridden(cls: type, is_base: Callable[[type], bool], /, *harmless: str) -> list[str]:
    """Return the names that `cls` overrides, compared with its first base that meets `is_base`.

    `harmless` are further names that do not change the behavior.
    """
    derived = takewhile(lambda other: not is_base(other), cls.__mro__)
    return sorted({name for other in derived for name in vars(other)} - _HARMLESS - {*harmless})


def list_obstacles(obstacles: dict[str, str], consequence: str) -> str:
    """Return one message for all `obstacles`, which map paths of layers to reasons; "" for none."""
    parts = []
    for why in dict.fromkeys(obstacles.values()):
        paths = [path or "the model itself" for path, other in obstacles.items() if other == why]
        if len(paths) > 4:
            paths[3:] = [f"and {len(paths) - 3} more"]
        parts.append(f"{', '.join(paths)} ({why})".replace(", and", " and"))
    return f"{len(obstacles)} {consequence}: {'; '.join(parts)}." if obstacles else ""


def _check_type(name: str, value: object, kind: type, expected: str, none: str) -> None:
    """Raise TypeError unless `value` is of type `kind`, or None if `none` is given."""
    if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and none)):
        raise TypeError(
            f"`{name}` must be {expected}{_or_none(none)}: got {value!r} of type "
            f"{type(value).__qualname__}."
        )


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
