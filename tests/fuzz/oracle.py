"""Batch norms of all ranks in float64, which autograd differentiates: the oracle of `machines`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

F64 = torch.float64
DELTA = 1e-6  # relative size of the changes that show the condition of a result
Buffers = dict[str, Tensor]  # of a layer, in float64


class RefusedBatchError(Exception):
    """The library refuses these batches: one value per channel, or a mask that leaves none."""


@dataclass
class Norm:
    """What a layer computes: which ranks share, and the options."""

    groups: list[list[int]]
    eps: float
    momentum: float | None
    weighting: str = "element"
    running_var: str = "unbiased_global"
    relu: bool = False
    training: bool = True
    tracked: bool = True
    splits: int = 1
    counts: bool = True  # whether `num_batches_tracked` moves; Chainer's `N`, in finetuning only
    kind: str = "whole"  # "interleaved": SubBatchNorm; "parts": convert_sub_batchnorm
    frozen: bool = False  # `split_bn` of a SubBatchNorm in evaluation mode

    def parts(self, x: Tensor) -> list[slice]:
        """The samples that have statistics of their own."""
        if not self.training or self.kind == "whole":
            return [slice(None)]
        if self.kind == "interleaved":
            return [slice(k, None, self.splits) for k in range(self.splits)]
        N = len(x)
        n = max(1, min(self.splits, N, x[:, 0].numel() // 2))
        stops = np.cumsum([0, *((N + k) // n for k in reversed(range(n)))])
        return [slice(*pair) for pair in pairwise(stops)]


@dataclass
class Moments:
    mean: Tensor
    var: Tensor  # biased
    count: int  # elements per channel on all ranks


def moments(xs: Sequence[Tensor], masks: Sequence[Tensor], weighting: str) -> Moments:
    """Mean and variance of batches `(N, C, L)`, differentiable."""
    counts = [int(m.sum()) for m in masks]
    total = sum(counts)
    if total == 1 or (total == 0 and any(m.numel() for m in masks)):
        raise RefusedBatchError
    samples = [int(m.any(1).sum()) for m in masks]
    weights = {"element": counts, "sample": samples, "rank": [int(n > 0) for n in counts]}
    a = weights[weighting]
    terms = [
        m[:, None].double() * (w / max(n, 1) / max(sum(a), 1))
        for m, n, w in zip(masks, counts, a, strict=True)
    ]
    mean = sum((p * x).sum((0, 2)) for p, x in zip(terms, xs, strict=True))
    var = sum((p * (x - _along(mean)) ** 2).sum((0, 2)) for p, x in zip(terms, xs, strict=True))
    return Moments(mean, var, total)  # type: ignore[arg-type]


def _along(v: Any) -> Tensor:
    along: Tensor = v[None, :, None]
    return along


class Oracle:
    """The layers of all ranks. `leaves[rank][n]` are a layer's weight and bias, or None."""

    def __init__(
        self,
        norms: list[Norm],
        parameters: list[list[Tensor | None]],
        buffers: list[list[Buffers]],
        *,
        disturbed: bool = False,
    ) -> None:
        self.norms = norms
        self._noise = torch.Generator().manual_seed(0) if disturbed else None
        self.leaves = [
            [[None if p is None else p.clone().requires_grad_() for p in ps] for ps in parameters]
            for _ in buffers
        ]
        self.buffers = [[dict(each) for each in layers] for layers in buffers]
        self._pools: dict[tuple[int, int], list[tuple[Moments, int]]] | None = None

    def call(
        self,
        n: int,
        xs: list[Tensor],
        masks: list[Tensor],
        *,
        residuals: list[Tensor] | None = None,
        masked: bool = True,
    ) -> list[Tensor]:
        """Outputs `(N, C, L)` of the n-th layer on all ranks; its running statistics move."""
        norm = self.norms[n]
        if not masked:
            masks = [torch.ones_like(m) for m in masks]
        xs = [torch.where(m[:, None], self.disturb(x), 0.0) for x, m in zip(xs, masks, strict=True)]
        ys = [torch.zeros_like(x) for x in xs]
        shares = norm.training and not norm.frozen and norm.kind != "parts"
        for ranks in norm.groups if shares else [[rank] for rank in range(len(xs))]:
            self._normalize(n, ranks, xs, masks, ys)
        for rank, m in enumerate(masks):
            y = ys[rank] if residuals is None else ys[rank] + residuals[rank]
            ys[rank] = torch.where(m[:, None], self.disturb(y.relu() if norm.relu else y), 0.0)
        return ys

    def disturb(self, x: Tensor) -> Tensor:
        """Change each number, and its gradient, by a part of some DELTA."""
        if self._noise is None:
            return x
        return x * (1 + DELTA * torch.randn(x.shape, generator=self._noise, dtype=x.dtype))

    def _normalize(
        self, n: int, ranks: list[int], xs: list[Tensor], masks: list[Tensor], ys: list[Tensor]
    ) -> None:
        norm, seen = self.norms[n], []
        for k, _ in enumerate(norm.parts(xs[ranks[0]])):
            of = [norm.parts(xs[rank])[k] for rank in ranks]
            parts = [xs[r][p] for r, p in zip(ranks, of, strict=True)]
            counted = [masks[r][p] for r, p in zip(ranks, of, strict=True)]
            running = self.running(ranks[0], n, k)
            if running is not None and (norm.frozen or not norm.training):
                batch = Moments(*running, -1)
            else:
                batch = moments(parts, counted, norm.weighting)
            seen.append((batch, [int(m.sum()) for m in counted]))
            invstd = (batch.var + norm.eps) ** -0.5
            for rank, part, x in zip(ranks, of, parts, strict=True):
                weight, bias = self.leaves[rank][n]
                y = (self.disturb(x) - _along(batch.mean)) * _along(invstd)
                y = y if weight is None else y * _along(weight)
                ys[rank][part] = y if bias is None else y + _along(bias)
        if norm.training and norm.kind == "parts":  # the running statistics are of the whole batch
            whole = moments([xs[ranks[0]]], [masks[ranks[0]]], "element")
            seen = [(whole, [int(masks[ranks[0]].sum())])]
        if not norm.training or norm.frozen or not norm.tracked:
            return
        for i, rank in enumerate(ranks):
            found = [(batch, counts[i]) for batch, counts in seen]
            if self._pools is None:
                self._move(rank, n, found)
            else:
                self._pools.setdefault((rank, n), []).extend(found)

    def running(self, rank: int, n: int, split: int) -> tuple[Tensor, Tensor] | None:
        """The running statistics by which a call normalizes, if it does."""
        norm, own = self.norms[n], self.buffers[rank][n]
        prefix = {"interleaved": "split_bn." if norm.training else "bn."}.get(norm.kind, "")
        if f"{prefix}running_mean" not in own:
            return None
        C = len(own[f"{prefix}running_mean"]) // (norm.splits if prefix == "split_bn." else 1)
        of = slice(split * C, (split + 1) * C)
        return own[f"{prefix}running_mean"][of], own[f"{prefix}running_var"][of]

    def _move(self, rank: int, n: int, seen: list[tuple[Moments, int]]) -> None:
        norm, own = self.norms[n], self.buffers[rank][n]
        if not seen[0][0].count:
            return
        prefix = "split_bn." if norm.kind == "interleaved" else ""
        names = [f"{prefix}{name}" for name in ("running_mean", "running_var")]
        counter = f"{prefix}num_batches_tracked"
        number = own.get(counter, torch.zeros(()).double()) + 1
        momentum = 1 / number if norm.momentum is None else norm.momentum
        own |= {counter: number} if norm.counts else {}
        means, variances = [], []
        for batch, local in seen:
            m = local or batch.count if norm.running_var == "unbiased_local" else batch.count
            means.append(batch.mean)
            variances.append(batch.var * (1 if norm.running_var == "biased" else m / max(m - 1, 1)))
        for name, new in zip(names, (torch.cat(means), torch.cat(variances)), strict=True):
            own[name] = own[name] + momentum * (new.detach() - own[name])
        if prefix:  # of the population
            mean, var = (own[name].view(norm.splits, -1) for name in names)
            own["bn.running_mean"] = mean.mean(0)
            own["bn.running_var"] = var.mean(0) + mean.var(0, correction=0)
            own["bn.num_batches_tracked"] = own[counter]

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Move running statistics once for all calls, as `step_statistics` does."""
        pools: dict[tuple[int, int], list[tuple[Moments, int]]] = {}
        self._pools = pools
        yield
        self._pools = None
        for (rank, n), seen in pools.items():
            count = sum(batch.count for batch, _ in seen)
            if not count:
                continue
            mean: Any = sum(b.mean * (b.count / count) for b, _ in seen)
            var: Any = sum((b.var + (b.mean - mean) ** 2) * (b.count / count) for b, _ in seen)
            batch = Moments(mean, var, count)
            self._move(rank, n, [(batch, sum(local for _, local in seen))])
