"""The pictures: colours for colour-blind readers, text for phones, and an alt text for each."""

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from benchmarks import plots
from evidence import batch_size, domains, precise, skew
from multibn import wire
from tests.helpers import launch
from tests.helpers.pages import MARKDOWN

NEEDS = "torch cli dev"

sys.path.append(str(launch.ROOT / "examples"))

import one_step  # noqa: E402
import pictures  # noqa: E402
import shared_axes  # noqa: E402
import who_shares  # noqa: E402

GUIDES, BENCHMARKS = launch.ROOT / "docs/guides", launch.ROOT / "benchmarks/results"
DEMO = str(GUIDES / "demo")  # from a run of the demo
SVG = [*GUIDES.glob("*.svg"), *BENCHMARKS.glob("*.svg")]

# Machado, Oliveira and Fernandes, 2009: what is left of linear red, green and blue.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
APART = 30.0  # in CIE 1976 L*a*b*, where the sides of a colour's name are about 10 apart
CONTRAST = 3.0  # WCAG 2.1, of graphics
PHONE, READABLE = 358, 9  # pixels: the width of text on a phone, the height of the smallest letters


def _xyz(colour: str, sight: str = "normal") -> np.ndarray[Any, Any]:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return TO_XYZ @ np.clip(SIGHTS[sight] @ linear, 0, 1)


def _difference(one: str, other: str, sight: str) -> float:
    def lab(colour: str) -> np.ndarray[Any, Any]:
        x, y, z = np.cbrt(_xyz(colour, sight) / np.sum(TO_XYZ, axis=1))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return float(np.linalg.norm(lab(one) - lab(other)))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", ["", "-dark"])
def test_colours_can_be_told_apart(theme: str, sight: str) -> None:
    page, colours = pictures.THEMES[theme]
    differences = {pair: _difference(*pair, sight) for pair in itertools.combinations(colours, 2)}
    assert min(differences.values()) >= APART, differences
    for colour in colours:
        dark, light = sorted(_xyz(c)[1] + 0.05 for c in (page, colour))
        assert light / dark >= CONTRAST, colour


def test_red_and_green_would_be_refused() -> None:
    assert _difference("#FF6347", "#32CD32", "normal") > APART
    assert _difference("#FF6347", "#32CD32", "deuteranopia") < APART


Figures = Mapping[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def figures() -> Figures:
    """What draws each picture, by its path."""
    drawn: dict[str, Callable[[], Any]] = {
        str(picture.PICTURE): picture.draw for picture in (who_shares, one_step, shared_axes)
    }
    for study in (skew, precise, batch_size, domains):
        results = json.loads((launch.ROOT / f"evidence/results/{study.NAME}.json").read_text())
        drawn[str(GUIDES / study.NAME)] = partial(study.draw, results["rows"])
    results = json.loads((BENCHMARKS / "bench.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "save", lambda draw, path: drawn.update({str(path): draw}))
        plots.draw(results, BENCHMARKS)
    return drawn


def test_text_is_whole_and_can_be_read_on_a_phone(figures: Figures) -> None:
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


def test_the_picture_of_a_step_shows_the_lengths_of_the_messages() -> None:
    lengths = [wire.HEAD + payload(0) for payload in (wire.forward_payload, wire.backward_payload)]
    shown = [numbers for label, numbers, _ in one_step.STEPS if label == one_step.MESSAGE]
    assert shown == [f"2C + {length} numbers" for length in lengths]
    for theme in ("", "-dark"):
        picture = Path(f"{one_step.PICTURE}{theme}.svg").read_text()
        assert all(f"<!-- {numbers} -->" in picture for numbers in shown)


@pytest.mark.parametrize("theme", ["", "-dark"])
def test_committed_pictures_have_these_colours(theme: str, figures: Figures) -> None:
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
