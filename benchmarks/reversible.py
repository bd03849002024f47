"""The time that reversible blocks take to run F and G again."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.worker import Measured
from multibn import Communicator
from multibn.check.timing import Step, take_turns
from multibn.torch_backend.reversible import RevMViT, RevMViTConfig
from multibn.torch_backend.reversible.sequence import Mode

DATA = Path(__file__).parents[1] / "tests/data"


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

    modes: tuple[Mode, ...] = ("stored", "reversible")
    steps: dict[str, Step] = {mode: step(make(model, pixels, mode)) for mode in modes}
    return take_turns(steps, communicator, seconds=seconds), {}


def make(name: str, pixels: int, mode: Mode) -> RevMViT:
    """The model of a published config by its name, or a ViT of width 192: "12 blocks"."""
    torch.manual_seed(0)
    if not name.endswith(" blocks"):
        return RevMViT.from_config(DATA / f"{name}.yaml", mode=mode)
    config = RevMViTConfig(
        crop_size=pixels, num_frames=1, num_classes=10, head_dropout_rate=0.0, patch_2d=True,
        patch_kernel=(16, 16), patch_stride=(16, 16), patch_padding=(0, 0), embed_dim=192,
        num_heads=3, depth=int(name.split()[0]), mode=mode,
    )  # fmt: skip
    return RevMViT(config)
