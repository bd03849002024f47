"""State machines of Chainer's links: right programs in random order, see `machines`."""

import io
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multibn import SingleProcess
from multibn import chainer_backend as cb
from multibn.communicators import Communicator
from tests.fuzz import machines
from tests.fuzz.calls import Array
from tests.fuzz.machines import Batches, Calls, flat, run_machines, shape, strided
from tests.fuzz.operations import Operations
from tests.fuzz.oracle import Buffers, Norm, Oracle
from tests.harness.runs import on

import chainer  # isort: skip  (multibn makes it importable)
from chainer import functions as F, links  # isort: skip

RUNS = on("torchrun mpiexec", 2, 3, needs="torch chainer")

NAMES = {"running_mean": "avg_mean", "running_var": "avg_var", "num_batches_tracked": "N"}


class ChainerMachine(Operations):
    OPERATIONS = Operations.OPERATIONS | {
        **{"npz": 2, "start_finetuning": 1, "averages": 2, "update": 2},
    }
    WAYS = (
        *("plain", "plain", "forget", "finetune", "step", "debug", "penalty", "penalty", "micro"),
        *("twice", "no_grad", "hook", "mixed16"),
    )
    CHOICES = {
        "eps": (2e-5, 1e-3, 0.1), "decay": (0.9, 0.3), "weighting": machines.WEIGHTINGS,
        "avg_var_convention": machines.CONVENTIONS, "fuse_relu": (True, False),
    }  # fmt: skip
    COPIES = Operations.COPIES | {
        "share": lambda chain: chain.copy("share"),
        "copy": lambda chain: chain.copy("copy"),
    }
    PARAMETERS = "gamma", "beta"
    NEW_PARAMETERS = "array", "strided", "anew"
    GROUP = "comm"
    MEANS = True
    check_sync = staticmethod(cb.check_sync)

    def __init__(self, world: Communicator, seed: int) -> None:
        super().__init__(world, seed)
        self.dtype = self.pick("float64", "float64", "float32")
        self.handles |= {"1": SingleProcess(), "pair": world.split(self.rank // 2)}
        self.chain = chainer.ChainList(*(self.link() for _ in range(self.rng.integers(3, 7))))
        self.log(self.C, "channels:", self.groups, [vars(norm) for norm in self.norms()])

    def link(self) -> Any:
        group = self.pick(*self.handles)
        self.groups.append(group)
        options: Any = {"dtype": self.dtype, "use_gamma": self.odds(0.8)}
        options |= {"use_beta": self.odds(0.8), "decay": self.pick(0.9, 0.3)}
        own = {"weighting": self.pick(*machines.WEIGHTINGS)}
        own["avg_var"] = self.pick(*machines.CONVENTIONS)
        link: Any
        if self.odds(0.3):
            plain = links.BatchNormalization(self.C, **options)
            link = cb.create_mnbn_model(plain, self.handles[group], **own)
        else:
            own["fuse_relu"] = self.odds(0.3)
            comm = self.handles[group]
            link = cb.MultiNodeBatchNormalization(self.C, comm, **options, **own)
        for p in link.params():
            p.array[...] = self.normal(self.C) + 1
        return link

    def new(self, group: Communicator) -> Any:
        return cb.MultiNodeBatchNormalization(self.C, group, decay=0.0)

    def apply(self, layer: Any, x: Array, residual: Array | None = None) -> Any:
        return layer(x, residual=residual)

    def buffers_of(self, layer: Any) -> Buffers:
        return {name: torch.tensor(getattr(layer, own)).double() for name, own in NAMES.items()}

    def norms(self, *, finetune: bool = False) -> list[Norm]:
        return [
            Norm(
                self.partitions[group], link.eps, None if finetune else 1 - link.decay,
                link.weighting, link.avg_var_convention, link.fuse_relu,
                training=chainer.config.train, counts=finetune,
            )
            for link, group in zip(self.chain, self.groups, strict=True)
        ]  # fmt: skip

    def parameters(self) -> list[list[Tensor | None]]:
        return [
            [None if p is None else torch.tensor(p.array).double() for p in (link.gamma, link.beta)]
            for link in self.chain
        ]

    def coarsest(self, calls: Calls, dtype: str) -> str:
        return dtype if self.dtype == "float64" or dtype == "float16" else "float32"

    def op_train(self) -> None:
        way = self.pick(*self.WAYS)
        calls = self.calls(1 if way == "mixed16" else 3, lambda n: way != "mixed16" or not n.relu)
        if not calls:
            return
        if way == "penalty" and self.dtype != "float64":  # float32 loses more than DELTA shows
            way = "plain"
        dtype = "float16" if way == "mixed16" else self.pick("float64", "float64", "float32")
        dtype = "float64" if way == "penalty" else dtype
        sizes = (0, 1, 1, 3) if way == "penalty" else (0, 1, 2, 3, 4, 5)
        self.compare_step(way, calls, dtype, sizes)

    def oracle(self, b: Any) -> Oracle:
        oracle = super().oracle(b)
        oracle.norms = self.norms(finetune=self.done[-1].split()[0] == "finetune")
        return oracle

    def step(self, b: Batches, calls: Calls, way: str, dtype: str) -> dict[str, Any]:
        N, C, L = b.xs[self.rank].shape
        given = shape(self.pick(3, 4, 5), N, C, L)
        value, mask = self.padded(b, 0.0, 1e4)
        with np.errstate(over="ignore"):
            array = self.laid_out(value.reshape(given)).astype(dtype)
        x = chainer.Variable(array)
        dy = chainer.Variable(self.laid_out(b.dys[self.rank].reshape(given)).astype(dtype))
        self.chain.cleargrads()

        def forward(x: Any) -> Any:
            for n, has_residual, activated in calls:
                x = F.tanh(x) if activated else x
                own = None if mask is None else mask.numpy().reshape((N, *given[2:]))
                residual = F.sin(x) if has_residual else None
                x = self.chain[n](x, way == "finetune", residual=residual, mask=own)
            return x

        with self.surroundings(way):
            run = partial(F.forget, forward) if way == "forget" else forward
            ys = [run(x) for _ in range(2 if way in ("micro", "step") else 1)]
            found = {"y": ys[-1].array.reshape(N, C, L)}
            if way == "penalty":
                loss = F.sum(ys[0] ** 3 * dy)
                (g,) = chainer.grad([loss], [x], enable_double_backprop=True)
                (F.sum(g * g) + loss).backward()
            elif way != "no_grad":
                for y in reversed(ys):
                    F.sum(y * dy).backward(retain_grad=False)
                if way == "twice":
                    F.sum(ys[0] * dy).backward()
        if way != "no_grad":
            found["dx"] = x.grad.reshape(N, C, L)
            used = {n for n, *_ in calls}
            for n, link in enumerate(self.chain):
                for name, p in (("weight", link.gamma), ("bias", link.beta)):
                    if p is not None:
                        found[f"d{name}{n}"] = p.grad if n in used else None
        return found | flat(self.own_buffers())

    def surroundings(self, way: str) -> Any:
        contexts: dict[str, Any] = {
            "no_grad": chainer.no_backprop_mode,
            "debug": partial(chainer.using_config, "debug", True),
            "step": partial(cb.step_statistics, self.chain),
            "hook": chainer.function_hooks.TimerHook,
            "mixed16": partial(chainer.using_config, "dtype", chainer.mixed16),
        }
        return contexts.get(way, nullcontext)()

    def op_evaluate(self) -> None:
        with chainer.using_config("train", False):
            # Chainer's own pass refuses other mixtures of dtypes.
            self.compare_step("no_grad", self.calls(), self.dtype, (0, 1, 2, 3, 4, 5))

    def op_npz(self) -> None:
        """There and back, through Chainer's own link."""
        _, link = self.some_layer()
        options = {"use_gamma": link.gamma is not None, "use_beta": link.beta is not None}
        plain = links.BatchNormalization(self.C, dtype=self.dtype, **options)
        for source, target in ((link, plain), (plain, link)):
            chainer.serializers.save_npz(file := io.BytesIO(), source)
            file.seek(0)
            chainer.serializers.load_npz(file, target)
            for p in link.params() if target is plain else ():
                p.array[...] = 0
        self.compare_buffers()

    def op_start_finetuning(self) -> None:
        self.some_layer()[1].start_finetuning()

    def set_parameter(self, link: Any, name: str, value: Tensor | None, way: str = "anew") -> None:
        if value is None:
            delattr(link, name)
            return
        new = value.numpy().astype(self.dtype)
        if way == "anew":
            with link.init_scope():
                setattr(link, name, chainer.Parameter(new))
        else:
            getattr(link, name).array = strided(new) if way == "strided" else new

    def op_averages(self) -> None:
        _, link = self.some_layer()
        way = self.pick("array", "strided", "fill")
        self.log("  ", way)
        for name in ("avg_mean", "avg_var"):
            new = (self.normal(self.C).numpy() ** 2 + 0.5).astype(self.dtype)
            if way == "fill":
                getattr(link, name)[...] = new
            else:
                setattr(link, name, strided(new) if way == "strided" else new)

    def op_update(self) -> None:
        """An optimizer's step, by gradients that are equal on all ranks."""
        optimizer = chainer.optimizers.SGD(0.1).setup(self.chain)
        for p in self.chain.params():
            p.grad = self.normal(*p.shape).numpy().astype(p.dtype)
        want = {name: p.array - 0.1 * p.grad for name, p in self.chain.namedparams()}
        optimizer.update()
        for name, p in self.chain.namedparams():
            np.testing.assert_allclose(p.array, want[name], rtol=1e-6)


def check_machines_of_chainer(world: Communicator) -> None:
    run_machines(ChainerMachine, world, 5000 + 1000 * world.size)
