"""Padded recordings and their statistics: the numbers of docs/guides/sequences.md.

pip install --no-deps aeon==1.6.0
python examples/sequences.py

Launches itself under torchrun with 1 to 4 ranks, and takes half a minute on two cores. The
recordings, JapaneseVowels (Kudo, Toyama and Shimbo, 1999), are in the wheel of aeon, which is not
imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from multibn.torch import SyncBatchNorm

BATCH, STEPS = 16, 5
PADDINGS = {"zeros": 0.0, "1e30": 1e30, "NaN": float("nan")}


def read(split: str) -> list[Tensor]:
    """Return the recordings of split "TRAIN" or "TEST", each of shape `(time, 12)`."""
    spec = importlib.util.find_spec("aeon")
    assert spec is not None, "pip install --no-deps aeon==1.6.0"
    assert spec.origin is not None
    name = f"datasets/data/JapaneseVowels/JapaneseVowels_{split}.ts"
    lines = (Path(spec.origin).parent / name).read_text().splitlines()
    recordings = []
    for line in lines[lines.index("@data") + 1 :]:
        *channels, _ = line.split(":")
        rows = [[float(v) for v in channel.split(",")] for channel in channels]
        recordings.append(torch.tensor(rows, dtype=torch.float64).t())
    return recordings


def part(batch: list[Tensor], rank: int, size: int) -> list[Tensor]:
    """Return a rank's recordings; later ranks get more."""
    ends = [len(batch) * k * (k + 1) // (size * (size + 1)) for k in range(size + 1)]
    return batch[ends[rank] : ends[rank + 1]]


def worst(got: Tensor, expected: Tensor) -> Tensor:
    """Return the largest error, relative to the largest expected value."""
    return (got.double() - expected).abs().max() / expected.abs().max()


def errors(recordings: list[Tensor], padding: float, masked: bool) -> list[float]:
    """Return the largest errors of y, dx and the running variance, over all steps and ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer, exact = SyncBatchNorm(12), nn.BatchNorm1d(12).double()
    largest = torch.zeros(3, dtype=torch.float64)
    for step in range(STEPS):
        batch = recordings[step * BATCH : (step + 1) * BATCH]
        own = part(batch, rank, size)
        lengths = torch.tensor([len(r) for r in own])
        x = pad_sequence(own, batch_first=True, padding_value=padding).float()
        x = x.transpose(1, 2).contiguous().requires_grad_()
        y = layer(x, lengths=lengths if masked else None)

        elements = torch.cat(batch).float().double().requires_grad_()
        first = sum(len(r) for k in range(rank) for r in part(batch, k, size))
        here = slice(first, first + int(lengths.sum()))
        counts = torch.arange(x.shape[2]) < lengths[:, None]
        expected = exact(elements)
        # A loss whose gradient is different for each element.
        (expected.sin() * elements.detach()).sum().backward()
        loss = (y.sin() * x.detach()).transpose(1, 2)[counts].sum()
        loss.backward()
        assert x.grad is not None
        assert elements.grad is not None
        got = y.detach().transpose(1, 2)[counts], x.grad.transpose(1, 2)[counts]
        own_errors = [
            worst(got[0], expected.detach()[here]),
            worst(got[1], elements.grad[here]),
            worst(layer.running_var, exact.running_var),  # type: ignore[arg-type]
        ]
        largest = torch.maximum(largest, torch.stack(own_errors))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def main() -> None:
    if "RANK" not in os.environ:
        for size in (1, 2, 3, 4):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run([*torchrun, f"--nproc-per-node={size}", __file__], check=True)
        return
    dist.init_process_group("gloo")
    recordings = read("TRAIN") + read("TEST")
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(recordings), generator=generator).tolist()
    recordings = [recordings[i] for i in order]
    rows = [("zeros, no lengths", 0.0, False)]
    rows += [(name, padding, True) for name, padding in PADDINGS.items()]
    for name, padding, masked in rows:
        y, dx, var = errors(recordings, padding, masked)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} rank(s), {name:18}: y {y:.1e}, dx {dx:.1e}, "
                  f"running_var {var:.1e}", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
