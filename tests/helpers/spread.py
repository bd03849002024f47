"""Cases for pytest.mark.parametrize that do not multiply."""

from collections.abc import Sequence
from itertools import product
from typing import Any


def spread(*axes: Sequence[Any], over: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All combinations of `axes`, each with one value of each list of `over`, in turn.

    Where two axes are as long as a list of `over`, its values meet each value of both.
    """
    cases = []
    for indices in product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, indices, strict=True)]
        cases.append((*values, *(other[sum(indices) % len(other)] for other in over)))
    return cases
