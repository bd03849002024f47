"""State machines of Chainer's links: right programs in random order, see `machines`."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multibn import SingleProcess
from multibn import chainer_backend as cb
from multibn.communicators import Communicator
from tests.fuzz import machines
from tests.fuzz.machines import Batches, Calls, flat, run_machines, shape, strided
from tests.fuzz.oracle import Buffers, Norm, Oracle
from tests.harness.runs import on

import chainer  # isort: skip  (multibn makes it importable)
from chainer import functions as F, links  # isort: skip

RUNS = on("torchrun mpiexec", 2, 3, needs="torch chainer")

NAMES = {"running_mean": "avg_mean", "running_var": "avg_var", "num_batches_tracked": "N"}
CHOICES: dict[str, tuple[Any, ...]] = {
    "eps": (2e-5, 1e-3, 0.1), "decay": (0.9, 0.3), "weighting": ("element", "sample", "rank"),
    "avg_var_convention": ("unbiased_global", "unbiased_local", "biased"),
    "fuse_relu": (True, False),
}  # fmt: skip


class ChainerMachine(machines.Machine):
    OPERATIONS = {
        **{
            "train": 20,
            "evaluate": 4,
            "options": 3,
            "copy": 3,
            "npz": 2,
            "group": 2,
            "start_finetuning": 1,
        },
        **{"parameters": 2, "without_parameters": 2, "averages": 2, "wrong_input": 3},
        **{"check_sync": 2, "update": 2},
    }
    WAYS = (
        *("plain", "plain", "forget", "finetune", "step", "debug", "penalty", "penalty", "micro"),
        *("twice", "no_grad", "hook", "mixed16"),
    )
    means = True

    def __init__(self, world: Communicator, seed: int) -> None:
        super().__init__(world, seed)
        self.dtype = self.pick("float64", "float64", "float32")
        whole = [[*range(self.size)]]
        self.partitions = {"world": whole, "1": [[rank] for rank in range(self.size)]}
        self.partitions["pair"] = whole if self.size == 2 else [[0, 1], [2]]
        self.handles = {"world": world, "1": SingleProcess(), "pair": world.split(self.rank // 2)}
        self.groups: list[str] = []
        self.chain: Any = chainer.ChainList(*(self.link() for _ in range(self.rng.integers(3, 7))))
        self.log(self.C, "channels:", self.groups, [vars(norm) for norm in self.norms()])

    def link(self) -> Any:
        group = self.pick(*self.partitions)
        self.groups.append(group)
        options: Any = {"dtype": self.dtype, "use_gamma": self.odds(0.8)}
        options |= {"use_beta": self.odds(0.8), "decay": self.pick(0.9, 0.3)}
        own = {"weighting": self.pick(*CHOICES["weighting"])}
        own["avg_var"] = self.pick(*CHOICES["avg_var_convention"])
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

    def own_buffers(self) -> list[Buffers]:
        return [
            {name: torch.tensor(getattr(link, own)).double() for name, own in NAMES.items()}
            for link in self.chain
        ]

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
        self.compare_step(way, calls, dtype, masked=self.odds(0.3))

    def compare_step(self, way: str, calls: Calls, dtype: str, *, masked: bool) -> None:
        self.log("  ", way, calls, dtype, "masked" * masked)
        sizes = (0, 1, 1, 3) if way == "penalty" else (0, 1, 2, 3, 4, 5)
        draw = partial(self.batches, dtype, sizes, masked=masked)
        wanted = partial(self.expected, calls=calls, way=way)
        b, want, moved = self.until_accepted(draw, wanted)
        self.log("  ", [tuple(x.shape) for x in b.xs])
        self.compare(self.step(b, calls, way, dtype), want, moved, self.coarsest(calls, dtype))

    def oracle(self, b: Any) -> Oracle:
        oracle = super().oracle(b)
        oracle.norms = self.norms(finetune=self.done[-1].split()[0] == "finetune")
        return oracle

    def step(self, b: Batches, calls: Calls, way: str, dtype: str) -> dict[str, Any]:
        N, C, L = b.xs[self.rank].shape
        given = shape(self.pick(3, 4, 5), N, C, L)
        value = b.xs[self.rank].clone()
        mask = b.masks[self.rank].numpy() if b.masked else None
        if mask is not None:
            value[~b.masks[self.rank][:, None].expand_as(value)] = self.pick(0.0, 1e4)
        with np.errstate(over="ignore"):
            array = self.laid_out(value.reshape(given)).astype(dtype)
        x = chainer.Variable(array)
        dy = chainer.Variable(self.laid_out(b.dys[self.rank].reshape(given)).astype(dtype))
        self.chain.cleargrads()

        def forward(x: Any) -> Any:
            for n, has_residual, activated in calls:
                x = F.tanh(x) if activated else x
                own = None if mask is None else mask.reshape((N, *given[2:]))
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

    @contextmanager
    def surroundings(self, way: str) -> Iterator[None]:
        contexts: dict[str, Any] = {
            "no_grad": chainer.no_backprop_mode,
            "debug": partial(chainer.using_config, "debug", True),
            "step": partial(cb.step_statistics, self.chain),
            "hook": chainer.function_hooks.TimerHook,
            "mixed16": partial(chainer.using_config, "dtype", chainer.mixed16),
        }  # fmt: skip
        with contexts.get(way, nullcontext)():
            yield

    def op_evaluate(self) -> None:
        with chainer.using_config("train", False):
            # Chainer's own pass refuses other mixtures of dtypes.
            self.compare_step("no_grad", self.calls(), self.dtype, masked=self.odds(0.3))

    def some_link(self) -> tuple[int, Any]:
        n = self.pick(*range(len(self.groups)))
        self.log("  ", n)
        return n, self.chain[n]

    def op_options(self) -> None:
        _, link = self.some_link()
        name = self.pick(*CHOICES)
        value = self.pick(*CHOICES[name])
        self.log("  ", name, value)
        setattr(link, name, value)

    def op_copy(self) -> None:
        way = self.pick("deepcopy", "pickle", "share", "copy")
        self.log("  ", way)
        if way == "deepcopy":
            self.chain = copy.deepcopy(self.chain)
        elif way == "pickle":
            self.chain = pickle.loads(pickle.dumps(self.chain))
        else:
            self.chain = self.chain.copy(way)
        self.compare_buffers()

    def op_npz(self) -> None:
        """There and back, through Chainer's own link."""
        _, link = self.some_link()
        options = {"use_gamma": link.gamma is not None, "use_beta": link.beta is not None}
        plain = links.BatchNormalization(self.C, dtype=self.dtype, **options)
        for source, target in ((link, plain), (plain, link)):
            chainer.serializers.save_npz(file := io.BytesIO(), source)
            file.seek(0)
            chainer.serializers.load_npz(file, target)
            for p in link.params() if target is plain else ():
                p.array[...] = 0
        self.compare_buffers()

    def op_group(self) -> None:
        n, link = self.some_link()
        group = self.groups[n] = self.pick(*self.partitions)
        self.log("  ", group)
        link.comm = self.handles[group]

    def op_start_finetuning(self) -> None:
        self.some_link()[1].start_finetuning()

    def op_parameters(self) -> None:
        _, link = self.some_link()
        new = (self.normal(self.C).numpy() + 1).astype(self.dtype)
        name, way = self.pick("gamma", "beta"), self.pick("array", "strided", "anew")
        if (p := getattr(link, name)) is None:
            return
        self.log("  ", name, way)
        if way == "anew":
            with link.init_scope():
                setattr(link, name, chainer.Parameter(new))
        else:
            p.array = strided(new) if way == "strided" else new

    def op_without_parameters(self) -> None:
        _, link = self.some_link()
        name = self.pick("gamma", "beta")
        if getattr(link, name) is not None:
            delattr(link, name)
            return
        with link.init_scope():
            setattr(
                link, name, chainer.Parameter((self.normal(self.C).numpy() + 1).astype(self.dtype))
            )

    def op_averages(self) -> None:
        _, link = self.some_link()
        way = self.pick("array", "strided", "fill")
        self.log("  ", way)
        for name in ("avg_mean", "avg_var"):
            new = (self.normal(self.C).numpy() ** 2 + 0.5).astype(self.dtype)
            if way == "fill":
                getattr(link, name)[...] = new
            else:
                setattr(link, name, strided(new) if way == "strided" else new)

    def op_wrong_input(self) -> None:
        n, link = self.some_link()
        guilty, wrong = self.pick(*range(self.size)), self.pick("channels", "dtype", "residual")
        self.log("  ", wrong, "on rank", guilty)
        groups = self.partitions[self.groups[n]]
        if guilty not in next(ranks for ranks in groups if self.rank in ranks):
            return
        x, residual = np.ones((4, self.C, 2), self.dtype), None
        kind: Any = RuntimeError
        if self.rank == guilty:
            kind = (TypeError, ValueError)
            residual = x[:1] if wrong == "residual" else None
            x = {"dtype": x.astype(int), "channels": np.concatenate([x, x], 1)}.get(wrong, x)
        with pytest.raises(kind):
            link(x, residual=residual)
        self.compare_buffers()

    def op_check_sync(self) -> None:
        first, *others = map(flat, self.buffers)
        alike = all(torch.equal(of[name], first[name]) for of in others for name in of)
        self.log("  ", alike)
        with nullcontext() if alike else pytest.raises(RuntimeError, match=r"avg_|/N"):
            cb.check_sync(self.chain, self.world)

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
