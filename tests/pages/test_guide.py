"""The example of docs/guides/from-chainermn-to-torch.md, run as it stands there."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multibn.chainer  # noqa: F401 (makes Chainer importable)
from tests.helpers import launch

from chainer import links, optimizer_hooks, optimizers  # isort: skip

NEEDS = "torch chainer"

GUIDE = launch.ROOT / "docs/guides/from-chainermn-to-torch.md"


def _write_scripts(folder: Path) -> None:
    """Each block of Python begins with a comment that names its file."""
    # The scripts find the modules of examples/, and each other's files.
    begin = f"import os, sys; os.chdir({str(folder)!r})\n"
    begin += f"sys.path.insert(0, {str(launch.ROOT / 'examples')!r})\n"
    # A fifth of the epoch, and of the images.
    begin += "import digits; digits.NUM_TRAIN, digits.STEPS_PER_EPOCH = 280, 35\n"
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        (folder / name).write_text(begin + code)


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def _train() -> tuple[list[float], list[float], str]:
    """Losses in Chainer and in torch, and what the change between them prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_scripts(folder)
        # In processes of Chainer alone, without torch.
        trained = launch.run("mpiexec", 2, str(folder / "train.py"), real=True)
        assert trained.returncode == 0, trained.stdout
        changed = launch.printed(
            "-W", "error", str(folder / "change.py"), interpreter=launch.python()
        )
        continued = launch.run("torchrun", 2, str(folder / "go_on.py"))
        assert continued.returncode == 0, continued.stdout
        return _losses(folder / "chainer.jsonl"), _losses(folder / "torch.jsonl"), changed


@pytest.mark.launches
@pytest.mark.beside(_train, "torch", "chainer", "torchrun", "mpiexec")
def test_training_goes_on_in_torch(beside: tuple[list[float], list[float], str]) -> None:
    of_chainer, of_torch, printed = beside
    assert "set the eps and momentum of the source model" in printed
    assert len(of_chainer) == 20
    np.testing.assert_allclose(of_torch, of_chainer, rtol=1e-5)


@pytest.mark.parametrize("name", ["weight decay", "clipping", "Adam"])
def test_optimizers_take_equal_steps(name: str) -> None:
    link, layer = links.Linear(3, 2), torch.nn.Linear(3, 2)
    for own, its in zip((layer.weight, layer.bias), (link.W, link.b), strict=True):
        own.data = torch.tensor(its.array)
    theirs = optimizers.Adam(0.1, eps=1e-30) if name == "Adam" else optimizers.MomentumSGD(0.1)
    theirs.setup(link)
    if name == "weight decay":
        theirs.add_hook(optimizer_hooks.WeightDecay(0.5))
    if name == "clipping":
        theirs.add_hook(optimizer_hooks.GradientClipping(0.5))
    decay = 0.5 if name == "weight decay" else 0.0
    parameters, SGD = list(layer.parameters()), torch.optim.SGD
    ours: Any = SGD(parameters, 0.1, momentum=0.9, weight_decay=decay)
    if name == "Adam":
        ours = torch.optim.Adam(parameters, 0.1, eps=1e-30)
    for step in range(3):
        for own, its in zip(parameters, (link.W, link.b), strict=True):
            its.grad = np.full_like(its.array, 1 + step)
            own.grad = torch.tensor(its.grad)
        if name == "clipping":
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        theirs.update()
        ours.step()
    for own, its in zip(parameters, (link.W, link.b), strict=True):
        np.testing.assert_allclose(own.detach(), its.array, rtol=1e-5, atol=1e-6)
