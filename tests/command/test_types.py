"""The types that a checker finds for users' code."""

import re
from pathlib import Path

import pytest

from tests.helpers import launch

PROGRAM = """
from torch import Tensor, nn
from multibn import observing
from multibn.torch import join

loader: list[tuple[Tensor, int]] = []
with observing() as seen, join(nn.Linear(1, 1)) as joined:
    for batch in joined(loader):
        reveal_type(batch)
reveal_type(seen)
"""


def test_batches_and_statistics_have_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    printed = launch.printed("-m", "mypy", str(program))
    batch, seen = re.findall('Revealed type is "(.*)"', printed)
    assert re.search(r"tuple\[torch\._tensor\.Tensor, (builtins\.)?int\]$", batch), printed
    assert re.match(r"(builtins\.)?list\[.*multibn\.engine\.observing\.LayerStatistics", seen), (
        printed
    )
