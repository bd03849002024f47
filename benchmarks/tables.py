"""Tables as Markdown has them, and their places in pages."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what is written is the same in a terminal and on a page."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(page: Path, name: str, text: str) -> None:
    """Replace what a page has between the comments `name` and `end of name`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
