"""The code on the pages: programs, commands and what the commands print."""

import re
from typing import NamedTuple

from tests.helpers import launch

MARKDOWN = sorted(
    str(path.relative_to(launch.ROOT))
    for pattern in ("*.md", "docs/**/*.md", "evidence/*.md", "faults/*.md", "tests/**/*.md")
    for path in launch.ROOT.glob(pattern)
)

# Pages whose programs need what `make programs` installs: tests/programs/test_recipes.py.
TRAINERS = ["docs/guides/trainers.md"]


class Command(NamedTuple):
    """A command of a page, and the lines that the page shows below."""

    line: str
    printed: list[str]


def python_blocks(page: str) -> list[str]:
    """All blocks of Python of a page, those inside a list included."""
    text = (launch.ROOT / page).read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def programs(page: str) -> dict[str, str]:
    """The blocks of Python that begin with a comment that names their file."""
    named = [(re.match(r"# (\w+\.py)\n", block), block) for block in python_blocks(page)]
    return {match[1]: block for match, block in named if match}


def script(page: str) -> str:
    """The blocks of Python that are no programs, and code that the page hides from its readers.

    Hidden code stands in comments that begin with `<!-- run`: what a block builds on, and what the
    block must have done. All other lines are empty, so that a traceback has the page's numbers.
    """
    text = (launch.ROOT / page).read_text()
    rows = [""] * text.count("\n")
    for block in re.finditer(
        r"^( *)(?:```python|<!-- run)\n(?!# \w+\.py\n)(.*?)^ *(?:```|-->)$",
        text,
        re.DOTALL | re.MULTILINE,
    ):
        first = text.count("\n", 0, block.start(2))
        for number, row in enumerate(block[2].splitlines(), first):
            rows[number] = row.removeprefix(block[1])
    return "\n".join(rows)


def commands(page: str) -> list[Command]:
    """The commands of the page's console blocks, in order."""
    text = (launch.ROOT / page).read_text()
    consoles = "".join(re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return [
        Command(line, printed.splitlines())
        for line, printed in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", consoles, re.MULTILINE)
    ]
