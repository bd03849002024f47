"""A network like ResNet-50, for which torchvision is not needed."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if num_in != 4 * width:
            self.shortcut.append(nn.Conv2d(num_in, 4 * width, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(blocks: Sequence[int] = BLOCKS, width: int = 64) -> nn.Sequential:
    """The layers of ResNet-50, in its order, with weights drawn from the default generator."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    num_in = width
    for stage, depth in enumerate(blocks):
        for i in range(depth):
            layers.append(Bottleneck(num_in, width << stage, 2 if stage and not i else 1))
            num_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))
