"""The guide's table of the memory that a step takes, and the measure itself."""

import contextlib
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.reversible import make
from tests.helpers import launch
from tests.helpers.memory import measure_memory

NEEDS = "torch"

KB, MB = 1024, 2**20
TABLE = re.findall(
    r"^\| ((?:Rev-M?ViT|ViT of|\d+ blocks).*?) \| (.*) \|$",
    (launch.ROOT / "docs/guides/reversible.md").read_text(),
    re.MULTILINE,
)


def test_bytes_are_those_counted_by_hand() -> None:
    weight = nn.Parameter(torch.ones(KB))  # 4 KB
    x = torch.ones(KB)

    def loss() -> Tensor:
        y = weight * x  # 4 KB; keeps x, and weight, which does not count
        z = y.exp()  # 4 KB, kept
        del y
        torch.zeros(3 * KB)  # 12 KB, gone at once
        return z.sum()  # 4 bytes

    # x and z; z and the zeros, since the backward pass makes y's gradient alone.
    assert measure_memory(loss, [weight]) == (8 * KB, 16 * KB)
    linear = nn.Linear(KB, 1)
    saved, peak = measure_memory(lambda: linear(x[None]).sum(), linear.parameters())
    assert saved == 4 * KB
    assert peak < KB  # of 4 KB in the weight's gradient


@pytest.mark.parametrize("model, cells", TABLE, ids=[model for model, _ in TABLE])
def test_the_guide_has_the_memory_of_a_step(
    model: str, cells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on tensors that have sizes only: a step of the largest model takes seconds."""
    monkeypatch.setattr(torch, "equal", lambda a, b: True)  # asked whether F has changed its input
    name = model.split(", ")[-1].lower().replace("-", "_")

    def measured(device: str) -> Iterator[list[float]]:
        for mode in ("stored", "reversible"):
            with torch.device("meta"):
                network = make(name, 224, mode)
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            with fakes if device == "cpu" else contextlib.nullcontext():
                x = torch.randn(2, 3, 224, 224, device=device)
                network.to_empty(device=device)
                found = measure_memory(lambda: network(x).sum(), network.parameters())  # noqa: B023
                yield [n / 2 / MB for n in found]

    (stored, peak), (kept, low) = measured("cpu")
    # The device without numbers has no kernel for attention, which is explicit there.
    (_, explicit_peak), (_, explicit_low) = measured("meta")
    numbers = [stored, kept, peak, low, peak / low, explicit_peak / explicit_low]
    assert cells == " | ".join(f"{n:.1f}" for n in numbers)
