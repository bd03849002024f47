"""benchmarks/step.md against a trace of a training step on two ranks."""

import pytest

from benchmarks import calls
from tests.helpers.launch import ROOT

NEEDS = "torch chainer torchrun mpiexec"


@pytest.mark.parametrize("framework", calls.FRAMEWORKS)
def test_the_page_of_a_step_shows_the_calls_of_a_trace(framework: str) -> None:
    page = (ROOT / "benchmarks/step.md").read_text()
    for name, trace in zip(("forward", "backward"), calls.traces(framework), strict=True):
        shown = page.partition(f"## {framework}, {name}\n")[2].partition("```text\n")[2]
        assert shown.partition("\n```")[0].splitlines() == [*calls.tree(trace)], (
            "Write benchmarks/step.md anew from `python -m benchmarks.calls`."
        )
