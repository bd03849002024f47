"""What README claims, beside the programs that tests/pages/test_pages.py runs."""

import re

import pytest

from tests.helpers import launch, require

README = (launch.ROOT / "README.md").read_text()
RENDERED = re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL)


def test_it_is_short() -> None:
    assert len(RENDERED.split()) <= 700


def test_the_gpu_comes_before_the_first_code() -> None:
    first, second, *_ = (part for part in RENDERED.split("\n\n")[1:] if part.strip())
    assert "one H200 has run it so far" in first + second


def test_each_row_of_the_comparison_has_tests() -> None:
    """Which exist, and are named row by row: tests/pages/test_names.py."""
    comparison = README[README.index("<!-- comparison -->") :]
    rows = re.findall(r"^\| ([^|]*) \| [^|]* \| [^|]* \|$", comparison, re.MULTILINE)
    tests = comparison.partition("<!-- tests of this table\n")[2].partition("\n-->")[0].splitlines()
    assert [line.partition(" | ")[0] for line in tests] == rows
    assert 0 < len(rows) <= 10


def test_precise_statistics_are_those_that_readme_shows() -> None:
    require.need("torch")
    import torch
    from torch import nn
    from torch.optim.swa_utils import update_bn

    from multibn.torch import update_bn_stats

    torch.manual_seed(0)
    loader = [torch.randn(1000, 1) + mean for mean in (-7.5, -2.5, 2.5, 7.5)]
    theirs, ours = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    update_bn(loader, theirs)
    update_bn_stats(ours, loader, progress=False)
    of_ours, of_theirs = (float(norm.running_var) for norm in (ours, theirs))  # type: ignore[arg-type]
    assert of_ours == pytest.approx(torch.cat(loader).var().item(), rel=1e-6)
    text = " ".join(README.split())
    assert f"have a variance of {of_ours:.1f}" in text
    assert f"`torch.optim.swa_utils.update_bn` finds {of_theirs:.2f}" in text
