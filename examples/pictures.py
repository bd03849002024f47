"""The style of all pictures. Each colour has the same meaning everywhere, on light and dark pages.

tests/pages/test_pictures.py checks that colour-blind readers can tell the colours apart, and that
the text can be read on a phone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

# SYNCHRONIZED: statistics of all ranks, multibn. PLAIN: statistics of one rank. INK: the reference
# and exact statistics. OTHER: other libraries. Curves of one colour differ by dashes or hatches.
SYNCHRONIZED, PLAIN, INK, OTHER = "C0", "C1", "C2", "C3"
# By file name suffix: background and the four colours. Blue and orange are Okabe and Ito's.
THEMES = {
    "": ("#FFFFFF", ("#0072B2", "#D55E00", "#1A1A1A", "#767676")),
    "-dark": ("#14181E", ("#56B4E9", "#E69F00", "#F0F0F0", "#8A8A8A")),
}
WIDTH = 4.8  # inches, shown as 461 pixels; a phone has 358


def style(theme: str) -> dict[Any, Any]:
    page, colours = THEMES[theme]
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    faces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(inked, colours[2]),
        **dict.fromkeys(faces, page),
        "axes.prop_cycle": cycler(color=colours),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "font.size": 11,
        "grid.color": colours[3],
        "grid.alpha": 0.3,
        "hatch.linewidth": 2,
        "legend.frameon": False,
        "svg.hashsalt": "multibn",  # makes files reproducible
    }


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Write `path`.svg and `path`-dark.svg; Sphinx shows the one that fits (docs/conf.py)."""
    for theme in THEMES:
        with matplotlib.rc_context(style(theme)):
            draw().savefig(f"{path}{theme}.svg", metadata={"Date": None})
