"""The record of a layer's options, from which checks, comparisons and the repr are derived."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from multibn._typing import Nonfinite, Weighting, check_bool, check_choice, check_eps


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """The options that torch's and Chainer's layers share; all ranks must have the same values.

    A subclass adds the options of a framework or of a layer as fields, and extends `check`.
    """

    eps: float = 1e-5
    weighting: Weighting = "element"
    nonfinite: Nonfinite = None
    fuse_relu: bool = False

    #: Maps an option to a layer's attribute of another name. For a bool: the attribute is not None.
    attributes: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @cache
    def attribute_names(cls) -> frozenset[str]:
        """Return the names of the attributes in which a layer stores its options."""
        return frozenset(cls.attributes.get(field.name, field.name) for field in fields(cls))

    @classmethod
    def of(cls, *layers: Any) -> Any:
        """Read the options from the current attributes of a layer and of its parts."""
        found: dict[str, Any] = {}
        for option, default in ((field.name, field.default) for field in fields(cls)):
            name = cls.attributes.get(option, option)
            value = next((getattr(v, name) for v in layers if hasattr(v, name)), default)
            by_presence = isinstance(default, bool) and option in cls.attributes
            found[option] = value is not None if by_presence else value
        return cls(**found)

    def check(self) -> None:
        """Raise TypeError or ValueError for an invalid value; the message names the option."""
        check_eps(self.eps)
        check_choice("weighting", self.weighting, Weighting)
        check_choice("nonfinite", self.nonfinite, Nonfinite)
        check_bool(fuse_relu=self.fuse_relu)

    def repr_of_changes(self, shown: str = "") -> str:
        """Return the options that differ from the defaults, for a repr, except those in `shown`."""
        changed = {k: v for k, v in vars(self).items() if v != getattr(type(self), k)}
        return "".join(f", {k}={v!r}" for k, v in changed.items() if f"{k}=" not in shown)


def differing(actual: Mapping[str, object], requested: Mapping[str, object]) -> str:
    """Return the options of `actual` that are not as `requested`, as in a repr."""
    different = [k for k, value in requested.items() if repr(actual[k]) != repr(value)]
    return ", ".join(f"{k}={actual[k]!r}" for k in different)
