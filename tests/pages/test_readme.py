"""What README claims, beside the programs that tests/pages/test_pages.py runs."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import launch, require
from tests.helpers.pages import commands, programs
from tests.pages.test_names import CLAIMS

README = (launch.ROOT / "README.md").read_text()
TEXT = " ".join(README.split())


def test_it_is_one_page_and_says_first_what_multibn_is() -> None:
    assert len(README.splitlines()) <= 130
    before_code = README.partition("```diff")[0]
    assert len(before_code.split()) <= 60
    assert README.index("## Install") < README.index("# train.py")


def test_the_line_changes_nothing_that_the_code_around_it_sees() -> None:
    require.need("torch")
    from torch import nn

    from multibn.torch import revert_sync_batchnorm

    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    keys = list(plain.state_dict())
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = [line for line in diff.splitlines() if line.startswith("+ ")]
    names = {"model": plain}
    exec("\n".join(line.removeprefix("+ ") for line in lines), names)
    assert isinstance(names["model"][1], nn.BatchNorm2d)
    assert list(names["model"].state_dict()) == keys
    assert type(revert_sync_batchnorm(names["model"])[1]) is nn.BatchNorm2d


def test_each_row_of_the_comparison_has_tests() -> None:
    """But the last one, which no test can show; checks_readme.py has those of torch's side."""
    comparison = README.partition("## Compared with torch.nn.SyncBatchNorm")[2]
    rows = re.findall(r"^\| ([^|]+) \| [^|]* \| [^|]* \|$", comparison, re.MULTILINE)
    claims = [line.split("\t") for line in CLAIMS.splitlines()]
    assert rows == [*[row for page, row, _ in claims if page == "README.md"], rows[-1]]


def _losses(size: int, program: str, folder: Path) -> list[str]:
    (folder / f"on_{size}.py").write_text(program)
    ran = launch.run("torchrun", size, str(folder / f"on_{size}.py"))
    assert ran.returncode == 0, ran.stdout
    return re.findall(r"^step .*$", ran.stdout, re.MULTILINE)


@pytest.mark.launches
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_program_prints_the_same_for_any_number_that_divides_the_images(
    size: int, tmp_path: Path
) -> None:
    assert "1, 2, 4 and 8 processes print the same losses" in TEXT
    program = programs("README.md")["train.py"]
    assert _losses(size, program, tmp_path) == commands("README.md")[0].printed


@pytest.mark.launches
@pytest.mark.parametrize("weighted", [False, True])
def test_three_processes_need_the_weights_of_join(weighted: bool, tmp_path: Path) -> None:
    program = programs("README.md")["train.py"]
    if weighted:
        loss = "labels[rank::size])\n"
        assert loss in program
        program = program.replace(loss, "labels[rank::size], reduction='none')\n")
        program = program.replace("optimizer.zero_grad()", "loss = joined.mean(loss)")
        program = program.replace("optimizer.step()", "optimizer.step(); optimizer.zero_grad()")
        loop = "for step in range(3):"
        program = program.replace(loop, "with join(model) as joined:\n  for step in joined(steps):")
        program = program.replace("\n    ", "\n      ").replace("step {step}", "step {int(step)}")
        setup = "from multibn.torch import join\nsteps = [torch.tensor([s]) for s in range(3)]\n"
        program = program.replace("dist.init", setup + "dist.init")
    right = _losses(3, program, tmp_path) == commands("README.md")[0].printed
    assert right == weighted


def test_numbers_are_those_of_the_records() -> None:
    speed = json.loads((launch.ROOT / "benchmarks/results/h200.json").read_text())["prepared"]
    rows = {part["part"]: part["rows"][0] for part in speed["parts"] if part["rows"]}
    times = rows["network"]["microseconds"]
    ours, torchs = (f"{times[name] / 1e3:.0f} ms" for name in ("multibn", "nn.SyncBatchNorm"))
    assert f"took {ours} on one H200" in TEXT
    assert f"with torch.nn.SyncBatchNorm {torchs}" in TEXT
    records = (launch.ROOT / "tests/programs/README.md").read_text()
    timm, torchvision = re.findall(r"(\d+) models; conversion and back", records)
    assert f"{timm} timm and {torchvision} torchvision models" in TEXT
    steps = re.findall(r" \d+ (?:steps|of \d+ layers share) \| ([\d.e-]+) \|", records)
    assert max(map(float, steps)) < 1e-12
    networks = f"{len([row for row in records.splitlines() if ', 2 steps' in row])} networks"
    assert networks in (launch.ROOT / "docs/tested.md").read_text()
    assert networks in TEXT
    skew = (launch.ROOT / "evidence/README.md").read_text()
    (row,) = re.findall(r"^\| 5 \| 2 classes on each rank \|.*", skew, re.MULTILINE)
    plain, _, ours = (f"{float(share):.0f} %" for share in re.findall(r"\| ([\d.]+) %", row))
    assert f"[from {plain} to {ours}]" in TEXT
    speed_page = (launch.ROOT / "docs/speed.md").read_text()
    ratios = re.findall(
        r"like ResNet-50 takes ([\d.]+) \(NCHW\) and ([\d.]+)", " ".join(speed_page.split())
    )
    nchw, channels_last = (f"{100 * float(ratio) - 100:.0f} %" for ratio in ratios[0])
    assert f"takes {nchw} (NCHW) to {channels_last} (channels_last) longer" in TEXT
