"""The example of docs/guides/from-chainermn-to-torch.md, run as it stands there."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np

from multibn._launch import environment
from tests.helpers import launch, require

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


def test_training_goes_on_in_torch(tmp_path: Path) -> None:
    require.need("torch", "chainer", "torchrun", "mpiexec")
    _write_scripts(tmp_path)
    # In processes of Chainer alone, without torch.
    trained = launch.run("mpiexec", 2, str(tmp_path / "train.py"), timeout=240, real=True)
    assert trained.returncode == 0, trained.stdout
    changed = subprocess.run(
        [launch.python(), "-W", "error", str(tmp_path / "change.py")],
        capture_output=True, text=True, timeout=100, env=environment(),
    )  # fmt: skip
    assert changed.returncode == 0, changed.stderr
    assert "num_batches_tracked, which is set to 0" in changed.stdout
    continued = launch.run("torchrun", 2, str(tmp_path / "go_on.py"))
    assert continued.returncode == 0, continued.stdout
    chainer, torch = _losses(tmp_path / "chainer.jsonl"), _losses(tmp_path / "torch.jsonl")
    assert len(chainer) == 20
    np.testing.assert_allclose(torch, chainer, rtol=1e-5)
