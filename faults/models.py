"""The networks in which the faults happen, in each framework."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

FEATURES, CHANNELS = 6, 4
NARROW = 2  # channels of the narrow branch
_PATHS = [f"layer{i}.{j}.bn{k}" for i, j in ((1, 0), (1, 1), (2, 0)) for k in (1, 2)]

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
MakeNorm: TypeAlias = Callable[[int], Any]


def batch(step: int, rank: int, count: int) -> Array:
    """The batch of a rank in a step: `count` samples, the same numbers in every program."""
    return np.random.default_rng([step, rank]).normal(rank, 1 + rank, size=(count, FEATURES))


def make_network(
    kind: str, make_norm: MakeNorm, kit: "TorchKit | ChainerKit", channels: int = CHANNELS
) -> Any:
    """A network in float64, of the framework of `kit`.

    Of the kinds, "blocks" has six batch norms, "layer1.0.bn1" and so on; "branches" has two of
    unlike widths side by side; "norm first" and "norm second" are a sequence each.
    """

    class Block(kit.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.swapped = self.skipped = self.evaluates = False
            with kit.children_of(self):
                self.bn1, self.bn2 = make_norm(channels), make_norm(channels)

        def forward(self, x: Any) -> Any:
            first, second = (self.bn2, self.bn1) if self.swapped else (self.bn1, self.bn2)
            with kit.evaluation(self.bn1, self.evaluates):
                x = first(x)
            return kit.tanh(x if self.skipped else second(x))

    class Blocks(kit.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embeds, self.recomputes = True, False
            with kit.children_of(self):
                self.stem = kit.linear(FEATURES, channels)
                self.layer1 = kit.Sequential(Block(), Block())
                self.layer2 = kit.Sequential(Block())

        def forward(self, x: Any) -> Any:
            x = self.stem(x) if self.embeds else x
            x = kit.recomputed(self.layer1, x) if self.recomputes else self.layer1(x)
            return self.layer2(x)

    class Branches(kit.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.swapped = False
            with kit.children_of(self):
                self.narrow, self.wide = make_norm(NARROW), make_norm(FEATURES)

        def forward(self, x: Any) -> Any:
            if self.swapped:
                wide, narrow = self.wide(x), self.narrow(x[:, :NARROW])
            else:
                narrow, wide = self.narrow(x[:, :NARROW]), self.wide(x)
            return kit.concat([narrow, wide])

    if kind == "blocks":
        return Blocks()
    if kind == "branches":
        return Branches()
    norms, linear = [make_norm(FEATURES), make_norm(FEATURES)], kit.linear(FEATURES, FEATURES)
    layers = {"norm first": [norms[0], linear, norms[1]], "norm second": [linear, *norms]}
    return kit.Sequential(*layers[kind])


class TorchKit:
    """What `make_network` takes of torch."""

    def __init__(self) -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        self.Module, self.Sequential = torch.nn.Module, torch.nn.Sequential
        self.children_of, self.tanh = contextlib.nullcontext, torch.tanh
        self.concat = functools.partial(torch.cat, dim=1)
        self.recomputed = functools.partial(checkpoint, use_reentrant=False)

    def linear(self, num_in: int, num_out: int) -> Any:
        import torch

        torch.manual_seed(0)
        return torch.nn.Linear(num_in, num_out)

    def evaluation(self, norm: Any, evaluates: bool) -> Any:
        norm.train(norm.training and not evaluates)
        return contextlib.nullcontext()


class ChainerKit:
    """What `make_network` takes of Chainer."""

    def __init__(self) -> None:
        import chainer

        self.Module, self.Sequential = chainer.Chain, chainer.Sequential
        self.tanh, self.concat = chainer.functions.tanh, chainer.functions.concat
        self.recomputed = chainer.functions.forget

    def children_of(self, chain: Any) -> Any:
        return chain.init_scope()

    def linear(self, num_in: int, num_out: int) -> Any:
        import chainer

        weight = np.random.default_rng(0).normal(size=(num_out, num_in))
        return chainer.links.Linear(num_in, num_out, initialW=weight)

    def evaluation(self, norm: Any, evaluates: bool) -> Any:
        import chainer

        return chainer.using_config("train", chainer.config.train and not evaluates)


class Torch:
    """Takes steps with a network of torch.

    Attributes
    ----------
    model
        What a program calls: the network, or the network in a DistributedDataParallel.
    network
        The network.
    """

    @staticmethod
    def make(kind: str, make_norm: MakeNorm, **options: Any) -> Any:
        return make_network(kind, make_norm, TorchKit(), **options).double()

    def __init__(self, model: Any) -> None:
        self.model = model
        self.network = getattr(model, "module", model)

    def step(self, x: Array, *, backward: bool = True) -> Array:
        """Forward and backward pass; the input's gradient."""
        import torch

        dtype = next(self.network.parameters()).dtype
        t = torch.tensor(x, dtype=dtype, requires_grad=True)
        if not backward:
            with torch.no_grad():
                self.model(t)
            return np.zeros_like(x)
        (self.model(t) ** 2).sum().backward()
        assert t.grad is not None
        return t.grad.numpy()

    def statistics(self) -> Array:
        """All running statistics."""
        buffers = self.network.state_dict().items()
        return np.concatenate([b.double().numpy().ravel() for k, b in buffers if "running_" in k])

    def norms(self) -> Sequence[Any]:
        return [m for name, m in self.network.named_modules() if ".bn" in name]

    def set_norms(self, norms: Sequence[Any]) -> None:
        for path, norm in zip(_PATHS, norms, strict=True):
            self.network.set_submodule(path, norm)

    def save(self, path: Path) -> None:
        """Write the state, as a program would."""
        import torch

        torch.save(self.network.state_dict(), path)

    def load(self, path: Path) -> None:
        import torch

        self.network.load_state_dict(torch.load(path))

    def evaluate(self) -> None:
        """Switch the network to evaluation."""
        self.model.eval()

    def single_precision(self) -> None:
        self.network.float()


class Chainer:
    """Takes steps with a network of Chainer."""

    @staticmethod
    def make(kind: str, make_norm: MakeNorm, **options: Any) -> Any:
        return make_network(kind, make_norm, ChainerKit(), **options)

    def __init__(self, network: Any) -> None:
        self.model = self.network = network
        self._dtype: Any = np.float64
        self._train = True

    def step(self, x: Array, *, backward: bool = True) -> Array:
        import chainer
        from chainer import functions as F

        self.network.cleargrads()
        v = chainer.Variable(x.astype(self._dtype))
        with chainer.using_config("train", self._train):
            if not backward:
                with chainer.no_backprop_mode():
                    self.network(v)
                return np.zeros_like(x)
            F.sum(self.network(v) ** 2).backward()
        return v.grad

    def statistics(self) -> Array:
        values = [getattr(link, name) for link in self.norms() for name in ("avg_mean", "avg_var")]
        return np.concatenate([v.ravel() for v in values])

    def norms(self) -> Sequence[Any]:
        return [link for path, link in sorted(self.network.namedlinks()) if "/bn" in path]

    def set_norms(self, norms: Sequence[Any]) -> None:
        for path, norm in zip(_PATHS, norms, strict=True):
            layer, block, name = path.split(".")
            chain = self.network[layer][int(block)]
            delattr(chain, name)
            chain.add_link(name, norm)

    def save(self, path: Path) -> None:
        from chainer import serializers

        with path.open("wb") as file:
            serializers.save_npz(file, self.network)

    def load(self, path: Path) -> None:
        from chainer import serializers

        with path.open("rb") as file:
            serializers.load_npz(file, self.network)

    def evaluate(self) -> None:
        self._train = False

    def single_precision(self) -> None:
        self._dtype = np.float32
        for parameter in self.network.params():
            parameter.array = parameter.array.astype(np.float32)
            parameter.cleargrad()


class ChainerMNLink(Chainer):
    """The same over ChainerMN's link."""

    def statistics(self) -> Array:
        # The link's variances are of each rank's own count, never those of the whole batch.
        return np.concatenate([link.avg_mean for link in self.norms()])
