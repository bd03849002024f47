"""The words that signatures share, and the checks of arguments that are numbers or such words.

All checks raise when an object is built, so that a mistake does not end a job hours later. Their
messages name the argument.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile
from numbers import Integral, Real
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


def check_int(name: str, value: object, least: int | None = 1, *, none: str = "") -> None:
    """Raise unless `value` is an int of at least `least`; a bool is none.

    `none` is the meaning of None, for the message; without a meaning None is refused.

    Raises
    ------
    TypeError
        If `value` is no int.
    ValueError
        If `value` is below `least`.
    """
    number = _checked_type(name, value, Integral, "an int", none)
    if number is not None and least is not None and number < least:
        wanted = {0: "0 or more", 1: "positive"}.get(least, f"{least} or more")
        raise ValueError(f"`{name}` must be {wanted}{_or_none(none)}: got {value!r}.")


def check_ints(name: str, values: Iterable[object], least: int = 1) -> None:
    """`check_int` of each of several values."""
    for value in values:
        check_int(name, value, least)


def check_number(name: str, value: object, interval: str, *, none: str = "") -> None:
    """Raise unless `value` is a number in `interval`, such as "[0, 1)"; a bool and NaN are none.

    "(0, inf)" stands for positive and finite numbers. `none` is as for `check_int`.

    Raises
    ------
    TypeError
        If `value` is no real number.
    ValueError
        If `value` is outside of `interval`.
    """
    number = _checked_type(name, value, Real, "a number", none)
    if number is None:
        return
    low, high = map(float, interval[1:-1].split(","))
    inside = (low <= number if interval[0] == "[" else low < number) and (
        number <= high if interval[-1] == "]" else number < high
    )
    if not inside:
        wanted = "positive and finite" if interval == "(0, inf)" else f"in {interval}"
        raise ValueError(f"`{name}` must be {wanted}{_or_none(none)}: got {value!r}.")


_LEAST_EPS = 2.0**-126  # the smallest normal number of float32


def check_eps(value: Any, /) -> None:
    """Raise unless `value` is positive, and large enough for a channel of equal values.

    Below 1e-77, that channel's inverse standard deviation is infinite in float32, and NaN comes
    out; subnormal numbers are 0 on some devices.

    Raises
    ------
    TypeError
        If `value` is no real number.
    ValueError
        If `value` is below 2**-126 or not finite.
    """
    check_number("eps", value, "(0, inf)")
    if value < _LEAST_EPS:
        raise ValueError(
            f"`eps` must be {_LEAST_EPS:.3g} or more, the smallest normal number of float32: got "
            f"{value!r}. A channel of equal values would be NaN."
        )


def check_residual(residual: Any, x: Array, kinds: Any, words: str) -> None:
    """Raise unless `residual` is of `kinds`, in words, and has the shape and dtype of `x`."""
    if not isinstance(residual, kinds):
        raise TypeError(f"`residual` must be {words}: got {type(residual).__qualname__}.")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"`residual` must have the shape and dtype of the input, {tuple(x.shape)} and "
            f"{x.dtype}: got {tuple(residual.shape)} and {residual.dtype}."
        )


# Of a class statement, or of the constructor: no call of a layer reads these.
_HARMLESS = {
    *("__abstractmethods__", "__annotations__", "__doc__", "__firstlineno__", "__init__"),
    *("__module__", "__static_attributes__", "_abc_impl"),
}


def overridden(cls: type, is_base: Callable[[type], bool], /, *harmless: str) -> list[str]:
    """The names by which `cls` may behave unlike its first base class for which `is_base` is true.

    `harmless` are further names that change nothing.
    """
    derived = takewhile(lambda other: not is_base(other), cls.__mro__)
    return sorted({name for other in derived for name in vars(other)} - _HARMLESS - {*harmless})


def _checked_type(name: str, value: Any, kind: type, words: str, none: str) -> Any:
    """`value`, of type `kind`, or None where None has a meaning."""
    if (value is None and none) or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise TypeError(
        f"`{name}` must be {words}{_or_none(none)}: got {value!r} of type "
        f"{type(value).__qualname__}."
    )


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
