"""The options of a layer, as one record: checks, comparisons, the repr and tests are made of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from multibn._typing import Nonfinite, Weighting, check_bool, check_choice, check_eps


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """The options that both frameworks have under one name; equal on all ranks.

    A framework, or a class of layers, adds options by fields of its own, and `check` for these.
    """

    eps: float = 1e-5
    weighting: Weighting = "element"
    nonfinite: Nonfinite = None
    fuse_relu: bool = False

    #: Where a layer has an option, if not under the option's name. A parameter stands for a bool.
    attributes: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @cache
    def attribute_names(cls) -> frozenset[str]:
        """Return the names of the attributes in which a layer has its options."""
        return frozenset(cls.attributes.get(field.name, field.name) for field in fields(cls))

    @classmethod
    def of(cls, *layers: Any) -> Any:
        """Read the options from the current attributes of a layer and of its parts."""
        found: dict[str, Any] = {}
        for option, default in ((field.name, field.default) for field in fields(cls)):
            name = cls.attributes.get(option, option)
            value = next((getattr(v, name) for v in layers if hasattr(v, name)), default)
            is_parameter = isinstance(default, bool) and option in cls.attributes
            found[option] = value is not None if is_parameter else value
        return cls(**found)

    def check(self) -> None:
        """Raise TypeError or ValueError, which names the option, for a wrong value."""
        check_eps(self.eps)
        check_choice("weighting", self.weighting, Weighting)
        check_choice("nonfinite", self.nonfinite, Nonfinite)
        check_bool(fuse_relu=self.fuse_relu)

    def repr_of_changes(self, said: str = "") -> str:
        """The options that are not the defaults, as text for a repr without those in `said`."""
        mine = {k: v for k, v in vars(self).items() if v != getattr(type(self), k)}
        return "".join(f", {k}={v!r}" for k, v in mine.items() if f"{k}=" not in said)
