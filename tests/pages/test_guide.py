"""The example of docs/guides/from-chainermn-to-torch.md, run as it stands there."""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import launch

pytestmark = pytest.mark.launches
GUIDE = launch.ROOT / "docs/guides/from-chainermn-to-torch.md"


def _write_scripts(folder: Path) -> None:
    """Each block of Python begins with a comment that names its file."""
    # The scripts find the modules of examples/, and each other's files.
    begin = f"import os, sys; os.chdir({str(folder)!r})\n"
    begin += f"sys.path.insert(0, {str(launch.ROOT / 'examples')!r})\n"
    # A fifth of the epoch, and of the images.
    begin += "import digits; digits.NUM_TRAIN, digits.STEPS_PER_EPOCH = 280, 35\n"
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        # As a test's other workers, it waits for gloo's thread to let go of its last tensor.
        end = "import time; time.sleep(0.5)\n" if "destroy_process_group" in code else ""
        (folder / name).write_text(begin + code + end)


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def _train() -> tuple[list[float], list[float], str]:
    """Losses in Chainer and in torch, and what the change between them prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_scripts(folder)
        # In processes of Chainer alone, without torch.
        trained = launch.run("mpiexec", 2, str(folder / "train.py"), timeout=240, real=True)
        assert trained.returncode == 0, trained.stdout
        changed = launch.printed(
            "-W", "error", str(folder / "change.py"), interpreter=launch.python()
        )
        continued = launch.run("torchrun", 2, str(folder / "go_on.py"))
        assert continued.returncode == 0, continued.stdout
        return _losses(folder / "chainer.jsonl"), _losses(folder / "torch.jsonl"), changed


@pytest.mark.beside(_train, "torch", "chainer", "torchrun", "mpiexec")
def test_training_goes_on_in_torch(beside: tuple[list[float], list[float], str]) -> None:
    chainer, torch, printed = beside
    assert "eps and momentum (Chainer's 1 - decay) are not in the file" in printed
    assert len(chainer) == 20
    np.testing.assert_allclose(torch, chainer, rtol=1e-5)
