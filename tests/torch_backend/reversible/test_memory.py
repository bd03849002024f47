"""How much memory a step takes: the measure itself, and what reversible models save by it."""

import pytest

from tests.helpers import require

require.need("torch")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.tensor_memory import measure_memory  # noqa: E402
from multibn.torch_backend.reversible import published_rev_mvit  # noqa: E402

KB = 1024


def test_bytes_are_those_counted_by_hand() -> None:
    weight = nn.Parameter(torch.ones(KB))  # 4 KB
    x = torch.ones(KB)

    def loss() -> Tensor:
        y = weight * x  # 4 KB; keeps x, and weight, which does not count
        z = y.exp()  # 4 KB, kept
        del y
        torch.zeros(3 * KB)  # 12 KB, gone at once
        return z.sum()  # 4 bytes

    weight.grad = torch.ones(KB)
    found = measure_memory(loss, [weight])
    assert found.saved == 8 * KB  # x and z
    assert found.peak == 16 * KB  # z and the zeros; the backward pass makes y's gradient alone
    assert weight.grad is None


def test_what_ends_as_a_gradient_does_not_count() -> None:
    x = torch.ones(1, KB)
    linear = nn.Linear(KB, 1)
    found = measure_memory(lambda: linear(x).sum(), linear.parameters())
    assert found.saved == 4 * KB
    assert found.peak < KB  # of 4 KB in the weight's gradient


@pytest.mark.parametrize("attention", ["default", "explicit"])
def test_a_published_model_needs_less_than_an_eighth(attention: str) -> None:
    """Table 1 of the paper has 66.5 and 8.8 MB an image for Rev-ViT-S, on a GPU."""
    from benchmarks.reversible import ATTENTION

    model = published_rev_mvit("rev_vit_s")
    x = torch.randn(1, 3, 224, 224)
    found = {}
    for mode in ("stored", "reversible"):
        model.rev_backbone.mode = mode
        with ATTENTION[attention]():
            found[mode] = measure_memory(lambda: model(x).sum(), model.parameters())
    stored, kept = found["stored"], found["reversible"]
    assert stored.peak / kept.peak > 8.9
    assert stored.saved / kept.saved > 25
    assert kept.peak < 8.8e6
