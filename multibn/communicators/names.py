"""What layers are called, for people."""

import sys
from collections.abc import Callable, Iterable
from typing import Any


def find_path(
    part: object, kind: type, named_parts: Callable[[Any], Iterable[tuple[str, object]]], /
) -> str:
    """The path of `part` in the outermost model of a `kind` whose methods are running now.

    "" if no running model has the part; `named_parts(model)` are its parts with their paths.
    """
    frame = sys._getframe(1)
    running = []
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, kind) and candidate is not part:
            running.append(candidate)
        frame = frame.f_back  # type: ignore[assignment]
    for model in reversed(running):
        for path, candidate in named_parts(model):
            if candidate is part:
                return path
    return ""


def for_people(name: str) -> str:
    """A layer's name, which in an nn.Sequential is a bare number, read as a layer's."""
    return f"layer {name}" if name[:1].isdigit() else name


def by_answer(answers: Iterable[str]) -> str:
    """Which ranks have given which answer, for people."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(rank)
    return "; ".join(f"rank(s) {members} in {answer}" for answer, members in ranks.items())
