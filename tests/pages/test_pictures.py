"""The pictures: their colours, and an alt text for each."""

import re
import sys

from tests.helpers import launch, require
from tests.helpers.pages import MARKDOWN

GUIDES, BENCHMARKS = launch.ROOT / "docs/guides", launch.ROOT / "benchmarks/results"
SVG = [*GUIDES.glob("*.svg"), *BENCHMARKS.glob("*.svg")]


def test_pictures_have_the_colours_of_their_theme() -> None:
    require.need("dev")
    sys.path.append(str(launch.ROOT / "examples"))
    import pictures

    for path in SVG:
        dark = path.stem.endswith("-dark")
        assert dark or path.with_stem(f"{path.stem}-dark") in SVG
        page, colours = pictures.THEMES["-dark" if dark else ""]
        used = set(re.findall(r"#[0-9a-f]{6}\b", path.read_text()))
        assert used <= {colour.lower() for colour in (page, *colours)}, path


def test_alt_texts_say_the_result() -> None:
    shown = set()
    for page in MARKDOWN:
        for alt, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", (launch.ROOT / page).read_text()):
            assert re.search(r"\d.* \w+.*\d", alt), f"{page}: {alt}"
            shown.add(((launch.ROOT / page).parent / target).resolve())
    assert shown == {path for path in SVG if not path.stem.endswith("-dark")}
