"""benchmarks/step.md against a trace of a training step on two ranks."""

import pytest

from benchmarks import calls
from tests.helpers.launch import ROOT

NEEDS = "core torch chainer torchrun mpiexec"

# Frames of multibn forward and backward: small layers spend their time in Python.
MOST = {"torch": (12, 9), "chainer": (13, 8)}


@pytest.mark.parametrize("framework", calls.FRAMEWORKS)
def test_the_page_of_a_step_shows_the_calls_of_a_trace(framework: str) -> None:
    page = (ROOT / "benchmarks/step.md").read_text()
    passes = zip(("forward", "backward"), MOST[framework], calls.traces(framework), strict=True)
    for name, most, trace in passes:
        assert len(trace["frames"]) <= most
        shown = page.partition(f"## {framework}, {name}\n")[2].partition("```text\n")[2]
        assert shown.partition("\n```")[0].splitlines() == [*calls.tree(trace)], (
            "Write benchmarks/step.md anew from `python -m benchmarks.calls`."
        )
