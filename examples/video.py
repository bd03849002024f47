"""Train a small reversible MViT to tell three films apart, with synchronized batch norms inside.

python -m torch.distributed.run --standalone --nproc-per-node 2 examples/video.py

Prints the accuracy on the last quarter of each film, which is not in the training set, and the
bytes kept for the backward pass, compared with the same model with stored activations.
"""

import argparse
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from films import FILMS, FRAMES, SIZE, Clips, decode
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from multibn.torch.reversible import RevMViT, RevMViTConfig

BATCH_SIZE = 4  # per rank; small, so that the statistics of one rank would be poor
CONFIG = RevMViTConfig(
    crop_size=SIZE,
    num_frames=FRAMES,
    num_classes=len(FILMS),
    embed_dim=32,
    num_heads=1,
    depth=8,
    patch_padding=(1, 3, 3),
    dim_mul=((4, 2.0),),
    head_mul=((4, 2.0),),
    pool_q_stride=((4, 1, 2, 2),),
    pool_kv_stride_adaptive=(1, 4, 4),
    pool_kvq_kernel=(3, 3, 3),
    buffer_layers=(4,),
    sep_pos_embed=True,
    head_dropout_rate=0.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--norm", default="sync_batchnorm",
                        choices=["sync_batchnorm", "batchnorm", "layernorm"])  # fmt: skip
    args = parser.parse_args()
    start = time.perf_counter()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    films = [decode(film) for film in FILMS]

    torch.manual_seed(args.seed)  # the same weights on all ranks, ...
    model = RevMViT(replace(CONFIG, norm=args.norm))
    torch.manual_seed(args.seed + rank)  # ... but different brightness
    train(model, Clips(films, training=True), args.epochs)
    right, total = test(model, Clips(films, training=False), rank, size)

    clips = torch.stack([films[0][:, :FRAMES]] * BATCH_SIZE)
    kept = {}
    for mode in ("stored", "reversible"):
        model.rev_backbone.mode = mode
        kept[mode] = kept_bytes(model.train(), clips)
    if rank == 0:
        for film, good, count in zip(FILMS, right, total, strict=True):
            print(f"{film}: {good} of {count} test clips")
        print(f"accuracy: {100 * sum(right) / sum(total):.1f} %")
        stored, used = (count / 2**20 for count in kept.values())
        print(f"kept for the backward pass: {used:.1f} MiB, stored activations: {stored:.1f} MiB")
        print(f"{time.perf_counter() - start:.0f} s on {size} ranks")
    dist.destroy_process_group()


def train(model: nn.Module, clips: Clips, epochs: int) -> None:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(clips, drop_last=True)
    loader = DataLoader(clips, BATCH_SIZE, sampler=sampler, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, epochs * len(loader))
    with tqdm(total=epochs * len(loader), unit="step", disable=dist.get_rank() != 0) as bar:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = F.cross_entropy(parallel(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.set_postfix(epoch=epoch, loss=f"{loss.item():.3f}", refresh=False)
                bar.update()


def kept_bytes(model: nn.Module, clips: Tensor) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(clips).square().mean()
    loss.backward()  # keeps the tensors alive until here, so that no address is reused
    return sum(size for address, size in kept.items() if address not in parameters)


@torch.no_grad()
def test(model: nn.Module, clips: Clips, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the numbers of recognized clips and of all clips per film, over all ranks."""
    model.eval()
    counts = torch.zeros(2, len(FILMS), dtype=torch.int64)
    for index in range(rank, len(clips), size):
        x, y = clips[index]
        counts[0, y] += int(model(x[None]).argmax() == y)
        counts[1, y] += 1
    dist.all_reduce(counts)
    right, total = counts.tolist()
    return right, total


if __name__ == "__main__":
    main()
