"""Tables as Markdown has them."""

from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what is written is the same in a terminal and on a page."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
