"""Memory that reversible blocks save, and the time that they take to run F and G again."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import tensor_memory
from benchmarks.timing import Measured, Step, take_turns
from multibn import Communicator
from multibn.torch_backend.reversible import RevMViT, RevMViTConfig, published_rev_mvit
from multibn.torch_backend.reversible.engine import Mode

MODES: tuple[Mode, ...] = ("stored", "reversible")
# Attention by the kernel that torch picks, and by the formula, with all scores in memory.
ATTENTION: dict[str, Callable[[], Any]] = {
    "default": contextlib.nullcontext,
    "explicit": lambda: sdpa_kernel(SDPBackend.MATH),
}


def measure_memory(
    communicator: Communicator, models: Sequence[str], pixels: int, batch: int
) -> Measured:
    """Notes: bytes of a step in both modes, for each model and kind of attention."""
    rows = []
    x = torch.randn(batch, 3, pixels, pixels)
    for name in models:
        for attention, context in ATTENTION.items():
            row: dict[str, Any] = {"model": name, "attention": attention, "batch": batch}
            for mode in MODES:
                model = _make(name, pixels, mode)
                with context():
                    memory = tensor_memory.measure_memory(
                        lambda m=model: m(x).sum(),  # type: ignore[misc]
                        model.parameters(),
                    )
                row[mode] = memory._asdict()
            rows.append(row)
    return {}, {"rows": rows}


def measure_time(
    communicator: Communicator, model: str, pixels: int, batch: int, seconds: float
) -> Measured:
    """Times of a step in each mode."""
    x = torch.randn(batch, 3, pixels, pixels)

    def step(network: RevMViT) -> Step:
        def run() -> None:
            network.zero_grad()
            loss: Tensor = network(x).square().mean()
            loss.backward()

        return run

    steps: dict[str, Step] = {mode: step(_make(model, pixels, mode)) for mode in MODES}
    return take_turns(steps, communicator, seconds=seconds), {}


def _make(name: str, pixels: int, mode: Mode) -> RevMViT:
    """A published model by its name, or a ViT of width 192: "12 blocks"."""
    torch.manual_seed(0)
    if not name.endswith(" blocks"):
        return published_rev_mvit(name, mode=mode)  # type: ignore[arg-type]
    config = RevMViTConfig(
        crop_size=pixels, num_frames=1, num_classes=10, head_dropout_rate=0.0, patch_2d=True,
        patch_kernel=(16, 16), patch_stride=(16, 16), patch_padding=(0, 0), embed_dim=192,
        num_heads=3, depth=int(name.split()[0]),
    )  # fmt: skip
    return RevMViT(config, mode=mode)
