"""What a package index shows, made of README, and the types that a checker finds in users' code."""

import re
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.helpers import launch

ADDRESS = "https://example.org/multibn"


def _built(folder: Path, urls: str) -> Message:
    """The metadata, with the lines `urls` under [project.urls]."""
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(launch.ROOT / name, folder)
    settings = (launch.ROOT / "pyproject.toml").read_text()
    (folder / "multibn").mkdir()
    (folder / "pyproject.toml").write_text(
        re.sub(r"(\[project\.urls\]\n)[^\[]*", rf"\1{urls}\n\n", settings)
    )
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return message_from_string((folder / "multibn.egg-info/PKG-INFO").read_text())


@pytest.mark.parametrize("urls", [f'Repository = "{ADDRESS}"', "", f'Changelog = "{ADDRESS}"'])
def test_links_and_pictures_lead_into_the_repository_or_nowhere(urls: str, tmp_path: Path) -> None:
    built = _built(tmp_path, urls)
    text = built.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(target.startswith("https://") for target in targets)
    if "Repository" in urls:
        assert f"{ADDRESS}/blob/HEAD/docs/guides/sequences.md" in targets
        assert f"{ADDRESS}/raw/HEAD/docs/guides/demo.svg" in targets
        for target in targets:
            path = target.partition("/HEAD/")[2].partition("#")[0]
            assert (launch.ROOT / path).exists(), target
    assert "cheat sheet" in text.lower()
    assert "<!--" not in text
    assert built["Description-Content-Type"] == "text/markdown"
    assert built["Summary"].startswith("Synchronized batch normalization")


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
