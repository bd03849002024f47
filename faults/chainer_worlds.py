"""Ranks with Chainer over ChainerMN, and the trainee that trains their networks."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import chainermn_link
from faults.networks import PATHS, Array
from faults.worlds import World
from multibn.chainer_backend import check_sync, compat, create_mnbn_model

compat.make_importable()
import chainer  # noqa: E402
import chainermn  # noqa: E402
from chainer import functions as F  # noqa: E402
from chainer import links as L  # noqa: E402
from chainer import serializers  # noqa: E402

chainer.global_config.dtype = np.dtype(np.float64)


class Trainee:
    """Train a Chainer network step by step; the interface is that of torch_worlds.Trainee."""

    Module, Sequential = chainer.Chain, chainer.Sequential
    average, check_sync = "avg_mean", staticmethod(check_sync)
    children_of = staticmethod(chainer.Chain.init_scope)
    tanh, concat = staticmethod(F.tanh), staticmethod(F.concat)
    recomputed = staticmethod(F.forget)

    @staticmethod
    def linear(num_in: int, num_out: int) -> Any:
        weight = np.random.default_rng(0).normal(size=(num_out, num_in))
        return L.Linear(num_in, num_out, initialW=weight)

    @staticmethod
    def evaluation(norm: Any, evaluates: bool) -> Any:
        return chainer.using_config("train", chainer.config.train and not evaluates)

    @staticmethod
    def in_float64(network: Any) -> Any:
        return network

    def __init__(self, network: Any) -> None:
        self.model = self.network = network
        self._dtype: Any = np.float64
        self._train = True
        self.penalizes = False  # the loss contains the gradient of the input: second derivatives

    def step(self, x: Array, *, backward: bool = True) -> Array:
        self.network.cleargrads()
        v = chainer.Variable(x.astype(self._dtype))
        with chainer.using_config("train", self._train):
            if not backward:
                with chainer.no_backprop_mode():
                    self.network(v)
                return np.zeros_like(x)
            loss = F.sum(self.network(v) ** 2)
            if self.penalizes:
                (dx,) = chainer.grad([loss], [v], enable_double_backprop=True)
                loss = F.sum(dx * dx)
            loss.backward()
        return v.grad

    def statistics(self) -> Array:
        values = [getattr(link, name) for link in self.norms() for name in ("avg_mean", "avg_var")]
        return np.concatenate([v.ravel() for v in values])

    def norms(self) -> list[Any]:
        return [v for _, v in sorted(self.network.namedlinks()) if hasattr(v, "avg_mean")]

    def set_norms(self, norms: list[Any]) -> None:
        for path, norm in zip(PATHS, norms, strict=True):
            layer, block, name = path.split(".")
            chain = self.network[layer][int(block)]
            delattr(chain, name)
            chain.add_link(name, norm)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            serializers.save_npz(file, self.network)

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            serializers.load_npz(file, self.network)

    def evaluate(self) -> None:
        self._train = False

    def single_precision(self) -> None:
        self._dtype = np.float32
        for parameter in self.network.params():
            parameter.array = parameter.array.astype(np.float32)
            parameter.cleargrad()


class ChainerMN(World):
    """The recipe for Chainer in README.md."""

    trainee = Trainee

    def __init__(self, count: int) -> None:
        self._enter_mpi(count)
        self.everybody, *self._communicators = (
            chainermn.create_communicator("naive", comm)
            for comm in (self.everybody, *self._communicators)
        )

    def norm(self, channels: int, communicator: Any) -> Any:
        return L.BatchNormalization(channels)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        return create_mnbn_model(model, communicator)


class _LinkTrainee(Trainee):
    def statistics(self) -> Array:
        # The link corrects the variance by the rank's count, not the whole batch's: compare means.
        return np.concatenate([link.avg_mean for link in self.norms()])


class ChainerMNLink(ChainerMN):
    """ChainerMN's MultiNodeBatchNormalization, without multibn."""

    trainee = _LinkTrainee

    def __init__(self, count: int) -> None:
        super().__init__(count)
        from mpi4py import MPI

        self.alone = chainermn.create_communicator("naive", MPI.COMM_SELF)

    def norm(self, channels: int, communicator: Any) -> Any:
        return chainermn_link(channels, communicator)

    def synchronize(self, model: Any, communicator: Any) -> Any:
        return model
