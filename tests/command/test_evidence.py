"""The experiments of evidence/: the pages show the committed results."""

import importlib
import json
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import launch, require

STUDIES = ("skew", "precise", "batch_size", "domains")


@pytest.fixture(scope="module", params=STUDIES)
def study(request: pytest.FixtureRequest) -> ModuleType:
    require.need("torch", "cli", "dev")
    return importlib.import_module(f"evidence.{request.param}")


def _results(study: ModuleType) -> dict[str, Any]:
    text = (launch.ROOT / f"evidence/results/{study.NAME}.json").read_text()
    results: dict[str, Any] = json.loads(text)
    return results


def test_the_pages_have_the_results(study: ModuleType) -> None:
    from evidence.__main__ import section

    assert section(study, _results(study)) in (launch.ROOT / "evidence/README.md").read_text()
    guide = (launch.ROOT / "docs/guides/which-batch-norm.md").read_text()
    assert f"]({study.NAME}.svg)" in guide
    assert (launch.ROOT / f"docs/guides/{study.NAME}.svg").exists()
    study.draw(_results(study)["rows"])


def test_synchronized_layers_gain_50_points_on_skewed_data() -> None:
    require.need("torch", "cli", "dev")
    from evidence import skew

    rows = _results(skew)["rows"]
    assert {row["seed"] for row in rows} == set(range(5))
    first, _, last = (skew.accuracy(rows, 5, "skewed", norm)[0] for norm in skew.NORMS)
    assert last - first >= 50
