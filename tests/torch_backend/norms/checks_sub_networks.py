"""Sub-networks of many widths: slices of one network, as once-for-all networks train them."""

import copy
from typing import Any

import torch
from torch import nn

from multibn.communicators import Communicator
from multibn.torch_backend import convert_sync_batchnorm, update_bn_stats
from tests.harness.runs import on
from tests.helpers.pages import programs

RUNS = on("torchrun mpiexec", 1, 2, 4, needs="torch")


def check_many_widths_train_and_are_calibrated_as_in_one_process(world: Communicator) -> None:
    """The network of docs/recipes/sub-networks.md, on batches of unequal sizes."""
    defined: dict[str, Any] = {}
    exec(programs("docs/recipes/sub-networks.md")["subnets.py"].split("dist.init")[0], defined)
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(2 + r, 3, 2, 2, generator=generator).double() + 3 * r for r in range(world.size)
    ]
    whole, mine = torch.cat(parts), parts[world.rank]
    torch.manual_seed(0)
    alone: Any = defined["Net"]().double()
    net: Any = convert_sync_batchnorm(copy.deepcopy(alone), world)
    for width in (8, 4, 6, 4, 8):
        net.width = alone.width = width
        y, expected = net(mine), _functional(alone, whole)
        start = sum(len(x) for x in parts[: world.rank])
        torch.testing.assert_close(y, expected[start:][: len(mine)], rtol=1e-12, atol=1e-12)
        for model, out in ((net, y), (alone, expected)):
            model.zero_grad()
            (out**3).sum().backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(world.allreduce(p.grad), q.grad, rtol=1e-9, atol=1e-9)
            with torch.no_grad():
                p -= 1e-3 * q.grad
                q -= 1e-3 * q.grad
        torch.testing.assert_close(net.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)
    small: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    with torch.no_grad():
        for own, shared in zip(small.parameters(), net.parameters(), strict=True):
            own.copy_(shared[:4])
    small = convert_sync_batchnorm(small, world)
    batches = mine.split(1)  # one less on rank 0 than on 1
    update_bn_stats(small, batches, progress=False, process_group=world)
    pixels = small[0](whole).detach().movedim(1, -1).reshape(-1, 4).numpy()
    torch.testing.assert_close(small[1].running_mean.numpy(), pixels.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        small[1].running_var.numpy(), pixels.var(0, ddof=1), rtol=1e-12, atol=0
    )


def _functional(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The network of one process, by torch's function at each width."""
    bn, c = net.norm.bn, net.width
    bn.num_batches_tracked += c == 8
    return nn.functional.batch_norm(
        nn.functional.conv2d(x, net.conv.weight[:c], net.conv.bias[:c]),
        *(bn.running_mean[:c], bn.running_var[:c], bn.weight[:c], bn.bias[:c]),
        training=True,
    )
