"""Operations on layers that a state machine of either framework draws, see `machines`."""

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from multibn.communicators import Communicator
from tests.fuzz.machines import Machine, flat


class Operations(Machine):
    OPERATIONS: dict[str, float] = {
        "train": 20, "evaluate": 4, "options": 3, "copy": 3, "group": 2, "parameters": 2,
        "without_parameters": 2, "wrong_input": 3, "wrong_option": 3, "check_sync": 2,
        "new_group": 4,
    }  # fmt: skip
    CHOICES: dict[str, tuple[Any, ...]]  # values of the attributes that are a layer's options
    COPIES: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda chain: pickle.loads(pickle.dumps(chain)),
    }
    PARAMETERS: tuple[str, str]
    NEW_PARAMETERS: tuple[str, ...]  # the ways to give a layer other parameters
    GROUP: str  # the attribute that says who shares

    # A layer over a group, which keeps its last batch's statistics; a layer's output for numbers
    # in float32, and perhaps a residual; and other parameters for it.
    new: Callable[[Communicator], Any]
    apply: Callable[..., Any]
    set_parameter: Callable[..., None]
    check_sync: Callable[..., None]

    def __init__(self, world: Communicator, seed: int) -> None:
        super().__init__(world, seed)
        self.kept: list[Any] = []

    def some_layer(self) -> tuple[int, Any]:
        n = self.pick(*range(len(self.groups)))
        self.log("  ", n)
        return n, self.layers[n]

    def set_option(self, layer: Any, name: str, value: Any) -> None:
        setattr(layer, name, value)

    def op_options(self) -> None:
        _, layer = self.some_layer()
        name = self.pick(*self.CHOICES)
        value = self.pick(*self.CHOICES[name])
        self.log("  ", name, value)
        self.set_option(layer, name, value)

    def op_copy(self) -> None:
        """All ranks go on with a copy, or one of them: to unpickle a group is collective."""
        way, ranks = self.pick(*self.COPIES), self.pick(range(self.size), [self.size - 1])
        ranks = ranks if way == "deepcopy" else range(self.size)
        self.log("  ", way, "on", ranks)
        if self.rank in ranks:
            self.chain = self.COPIES[way](self.chain)
        self.compare_buffers()

    def op_group(self) -> None:
        n, layer = self.some_layer()
        if self.norms()[n].kind != "parts":
            group = self.groups[n] = self.pick(*self.handles)
            self.log("  ", group)
            setattr(layer, self.GROUP, self.handles[group])

    def op_parameters(self) -> None:
        _, layer = self.some_layer()
        name, way = self.pick(*self.PARAMETERS), self.pick(*self.NEW_PARAMETERS)
        self.log("  ", name, way)
        if getattr(layer, name) is not None:
            self.set_parameter(layer, name, self.normal(self.C) + 1, way)

    def op_without_parameters(self) -> None:
        _, layer = self.some_layer()
        name, new = self.pick(*self.PARAMETERS), self.normal(self.C) + 1
        self.set_parameter(layer, name, new if getattr(layer, name) is None else None)

    def some_guilty(self) -> tuple[int, int, list[int]]:
        """A layer in training, the rank that calls it wrongly, and this rank's group."""
        may = [n for n, norm in enumerate(self.norms()) if norm.training and not norm.frozen]
        n, guilty = self.pick(*may or [-1]), self.pick(*range(self.size))
        self.log("  ", n, "on rank", guilty)
        groups = self.norms()[n].groups if may else []
        return n, guilty, next((ranks for ranks in groups if self.rank in ranks), [])

    def op_wrong_input(self) -> None:
        n, guilty, group = self.some_guilty()
        wrong = self.pick("channels", "dtype", "residual")
        self.log("  ", wrong)
        if guilty not in group:
            return
        x, residual = np.ones((4, self.C, 4), "f"), None
        kind: Any = RuntimeError
        wrong = "channels" if self.norms()[n].kind == "interleaved" else wrong
        if self.rank == guilty:
            kind = (TypeError, ValueError)
            residual = x[:1] if wrong == "residual" else None
            x = {"dtype": x.astype(int), "channels": np.concatenate([x, x], 1)}.get(wrong, x)
        with pytest.raises(kind):
            self.apply(self.layers[n], x, residual)
        self.compare_buffers()

    def op_wrong_option(self) -> None:
        n, guilty, group = self.some_guilty()
        name = self.pick(*self.CHOICES)
        self.log("  ", name)
        if guilty not in group or len(group) == 1 or self.norms()[n].kind != "whole":
            return
        layer = self.layers[n]
        right = getattr(layer, name)
        if self.rank == guilty:
            setattr(layer, name, next(v for v in self.CHOICES[name] if v != right))
        with pytest.raises(ValueError, match="differently: rank"):
            self.apply(layer, np.ones((4, self.C, 4), "f"))
        setattr(layer, name, right)
        self.compare_buffers()

    def op_check_sync(self) -> None:
        first, *others = map(flat, self.buffers)
        alike = all(torch.equal(of[name], first[name]) for of in others for name in of)
        self.log("  ", alike)
        with (
            nullcontext() if alike else pytest.raises(RuntimeError, match=r"running|num_b|avg_|/N")
        ):
            self.check_sync(self.chain, self.world)

    def op_new_group(self) -> None:
        """Groups that come and go, and layers that are never called, leave nothing behind."""
        colors = self.rng.integers(0, 2, self.size)
        steps = self.rng.integers(0, 3, 2)[colors[self.rank]]
        group = self.world.split(int(colors[self.rank]))
        layer, members = self.new(group), np.flatnonzero(colors == colors[self.rank])
        for _ in range(steps):
            x = np.full((2, self.C, 1), self.rank, "f") + np.array([[[1]], [[3]]], "f")
            self.apply(layer, x)
            mean = self.buffers_of(layer)["running_mean"]
            np.testing.assert_allclose(mean, 2 + members.mean(), rtol=1e-6)
        if self.odds(0.3):
            self.kept.append(self.new(self.world))
        if self.odds(0.5):
            del layer
            gc.collect()
