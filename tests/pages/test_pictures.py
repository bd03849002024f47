"""The pictures: their colours, text for phones, and an alt text for each."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.helpers import launch, require
from tests.helpers.pages import MARKDOWN

require.need("torch", "cli", "dev")
sys.path.append(str(launch.ROOT / "examples"))
GUIDES, BENCHMARKS = launch.ROOT / "docs/guides", launch.ROOT / "benchmarks/results"
DEMO = str(GUIDES / "demo")  # from a run of the demo
SVG = [*GUIDES.glob("*.svg"), *BENCHMARKS.glob("*.svg")]

PHONE, READABLE = 358, 9  # pixels: the width of text on a phone, the height of the smallest letters


Figures = Mapping[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """What draws each picture, by its path."""
    import pictures
    import who_shares

    from benchmarks import plots
    from evidence import batch_size, domains, precise, skew

    drawn: dict[str, Callable[[], Any]] = {str(who_shares.PICTURE): who_shares.draw}
    for study in (skew, precise, batch_size, domains):
        results = json.loads((launch.ROOT / f"evidence/results/{study.NAME}.json").read_text())
        drawn[str(GUIDES / study.NAME)] = partial(study.draw, results["rows"])
    results = json.loads((BENCHMARKS / "bench.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "save", lambda draw, path: drawn.update({str(path): draw}))
        plots.draw(results, BENCHMARKS)
    return drawn


def test_text_is_whole_and_can_be_read_on_a_phone(
    figures: Figures,
) -> None:
    import matplotlib
    import pictures
    from matplotlib.text import Text

    for path, draw in figures.items():
        with matplotlib.rc_context(pictures.style("")):
            figure = draw()
            figure.draw_without_rendering()
            for text in figure.findobj(Text):
                if text.get_visible() and text.get_text().strip():
                    pixels = text.get_fontsize() / 72 * PHONE / figure.get_figwidth()
                    assert pixels >= READABLE, (path, text.get_text(), pixels)
            (left, bottom), (right, top) = figure.get_tightbbox().get_points()
            assert min(left, bottom) > -0.02, path
            assert right < figure.get_figwidth() + 0.02, path
            assert top < figure.get_figheight() + 0.02, path


@pytest.mark.parametrize("theme", ["", "-dark"])
def test_committed_pictures_have_these_colours(theme: str, figures: Figures) -> None:
    import pictures

    page, colours = pictures.THEMES[theme]
    committed = {str(path.with_suffix("")) for path in SVG}
    assert committed == {f"{path}{theme}" for path in [*figures, DEMO] for theme in pictures.THEMES}
    for path in SVG:
        if path.stem.endswith("-dark") == bool(theme):
            used = set(re.findall(r"#[0-9a-f]{6}\b", path.read_text()))
            assert used <= {colour.lower() for colour in (page, *colours)}, path


def test_alt_texts_say_the_result() -> None:
    shown = set()
    for page in MARKDOWN:
        for alt, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", (launch.ROOT / page).read_text()):
            assert re.search(r"\d.* \w+.*\d", alt), f"{page}: {alt}"
            shown.add(((launch.ROOT / page).parent / target).resolve())
    assert shown == {path for path in SVG if not path.stem.endswith("-dark")}
