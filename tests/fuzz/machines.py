"""Right programs on the same layers in random order, and what they must compute.

A machine draws operations from a seed that all ranks have, so that all ranks run the same program.
It compares what its rank finds with `Oracle`, float64 autograd over the batches of all ranks. After
each operation the ranks exchange their errors, so that all end together, and the buffers of their
layers, from which the oracle goes on.
"""

import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multibn.communicators import Communicator
from multibn.communicators.communicator import gather
from tests.fuzz.calls import CALLS, Array, laid_out
from tests.fuzz.oracle import DELTA, F64, Buffers, Norm, Oracle, RefusedBatchError

MANY = "MULTIBN_FUZZ" in os.environ
# `make fuzz` runs 100 machines in each framework, divided among four checks.
MACHINES, OPERATIONS = (CALLS // 400, 50) if MANY else (1, 25)
FIRST_SEED = int(os.environ.get("MULTIBN_FUZZ_SEED", "0"))
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
WITHOUT_BACKWARD = "no_grad", "inference_mode"
WEIGHTINGS = "element", "sample", "rank"
CONVENTIONS = "unbiased_global", "unbiased_local", "biased"
Expected = dict[str, Any]  # tensors by name; None for no gradient
Calls = tuple[tuple[int, bool, bool], ...]  # layers, whether with a residual, and after a tanh


@dataclass
class Batches:
    """What all ranks pass: inputs and their gradients `(N, C, L)`, and which elements count."""

    xs: list[Tensor]
    dys: list[Tensor]
    masks: list[Tensor]
    masked: bool
    disturbed: bool = False  # by small relative changes, which show the condition of the results


class Machine:
    """Layers of one framework, and operations on them, which are methods `op_*` of subclasses."""

    OPERATIONS: dict[str, float]  # by name, with weights
    WAYS: tuple[str, ...]  # of training steps
    MEANS = False  # whether gradients of parameters are means over a layer's ranks

    buffers_of: Callable[[Any], Buffers]  # running statistics of a layer
    # What the layers compute now; weight and bias of each in float64; what `expected` has, by the
    # layers; and the dtype whose rounding bounds what some calls give.
    norms: Callable[[], list[Norm]]
    parameters: Callable[[], list[list[Tensor | None]]]
    step: Callable[..., Expected]
    coarsest: Callable[[Calls, str], str]

    def __init__(self, world: Communicator, seed: int) -> None:
        self.world, self.size, self.rank = world, world.size, world.rank
        self.rng = np.random.default_rng(seed)
        self.C = int(self.rng.integers(1, 4))
        self.done: list[str] = []
        self.buffers: list[list[Buffers]] = []  # of all ranks' layers, after the last operation
        whole = [[*range(self.size)]]
        pair = whole if self.size == 2 else [[0, 1], [2]]
        self.partitions = {"world": whole, "1": [[rank] for rank in whole[0]], "pair": pair}
        self.handles: dict[str, Any] = {"world": world}  # the groups of `partitions`
        self.groups: list[str] = []  # of each layer
        self.chain: Any

    @property
    def layers(self) -> Any:
        return self.chain

    def own_buffers(self) -> list[Buffers]:
        """The running statistics of this rank's layers."""
        return [self.buffers_of(layer) for layer in self.layers]

    def close(self) -> None:
        """Free what the machine has made. Collective."""

    def pick(self, *options: Any) -> Any:
        """One of `options`, the same on all ranks."""
        return options[self.rng.integers(len(options))]

    def odds(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def log(self, *words: object) -> None:
        self.done.append(" ".join(map(str, words)))

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.asarray(self.rng.normal(size=shape)))

    def batches(self, dtype: str, sizes: Sequence[int], *, masked: bool = False) -> Batches:
        """Batches of `dtype`'s numbers; a rank may have none, one sample, or none that counts."""
        L = self.pick(1, 4)
        xs, dys, masks = [], [], []
        for _ in range(self.size):
            N = self.pick(*sizes)
            x = self.normal(N, self.C, L) * self.rng.uniform(0.5, 2) + self.rng.normal()
            xs.append(x.to(getattr(torch, dtype)).double())
            dys.append(self.normal(N, self.C, L).to(getattr(torch, dtype)).double())
            mask = torch.from_numpy(self.rng.random((N, L)) < self.pick(0.0, 0.6, 0.9))
            masks.append(mask if masked else torch.ones_like(mask))
        return Batches(xs, dys, masks, masked)

    def until_accepted(
        self, draw: Callable[[], Any], expected: Callable[[Any], Expected]
    ) -> tuple[Any, Expected, Expected]:
        """Batches that no layer refuses, what they must give, and the same after small changes."""
        for _ in range(100):
            batches = draw()
            try:
                return batches, expected(batches), expected(replace(batches, disturbed=True))
            except RefusedBatchError:
                continue
        raise AssertionError("no batches that the layers accept")

    def laid_out(self, x: Tensor, rank: int = 0) -> Array:
        """The numbers in memory of any layout, each rank's own."""
        layout = self.pick("dense", "dense", "permuted", "sliced", "offset")
        a = np.ascontiguousarray(x.numpy())
        return laid_out(a, layout, np.random.default_rng(len(self.done) + rank))

    def padded(self, b: Batches, *paddings: float) -> tuple[Tensor, Tensor | None]:
        """This rank's input, with one of `paddings` where no element counts, and the mask."""
        x, mask = b.xs[self.rank].clone(), b.masks[self.rank]
        if b.masked and paddings:
            x[~mask[:, None].expand_as(x)] = self.pick(*paddings)
        return x, mask if b.masked else None

    def calls(self, longest: int = 3, which: Callable[[Norm], bool] = lambda _: True) -> Calls:
        """Layers to call, some of them twice."""
        norms = self.norms()
        usable = [n for n, norm in enumerate(norms) if which(norm)]
        if not usable:
            return ()
        chosen = [int(self.pick(*usable)) for _ in range(self.rng.integers(1, longest + 1))]
        may = [norms[n].kind != "interleaved" for n in chosen]
        return tuple(
            (n, can and self.odds(0.2), self.odds(0.3)) for n, can in zip(chosen, may, strict=True)
        )

    def oracle(self, b: Any) -> Oracle:
        return Oracle(self.norms(), self.parameters(), self.buffers, disturbed=b.disturbed)

    def run_oracle(self, oracle: Oracle, calls: Calls, b: Batches, xs: Any = None) -> list[Tensor]:
        """Outputs of the layers of `calls`, one after the other."""
        xs = b.xs if xs is None else xs
        for n, has_residual, activated in calls:
            xs = [torch.tanh(x) for x in xs] if activated else xs
            residuals = [torch.sin(x) for x in xs] if has_residual else None
            masked = b.masked and oracle.norms[n].kind != "interleaved"
            xs = oracle.call(n, xs, b.masks, residuals=residuals, masked=masked)
        return xs

    def expected(self, b: Batches, calls: Calls, way: str, needs: Sequence[bool] = ()) -> Expected:
        """This rank's output, gradients and buffers after a training step.

        `needs` says for each layer whether its parameters need gradients, and last for the input.
        """
        oracle, xs = self.oracle(b), [x.clone().requires_grad_() for x in b.xs]
        needs = needs or [True] * (len(oracle.norms) + 1)
        many = 2 if way in ("micro", "step") else 1
        with oracle.one_step() if way == "step" else nullcontext():
            outputs = [self.run_oracle(oracle, calls, b, xs) for _ in range(many)]
        found: Expected = {"y": outputs[-1][self.rank], **flat(oracle.buffers[self.rank])}
        if way in WITHOUT_BACKWARD:
            return found
        pairs = [pair for ys in outputs for pair in zip(ys, b.dys, strict=True)]
        power = 3 if way == "penalty" else 1
        loss: Any = sum((y**power * dy).sum() for y, dy in pairs)
        leaves = [p for rank in oracle.leaves for layer in rank for p in layer if p is not None]
        if way == "penalty":
            dxs = torch.autograd.grad(loss, xs, create_graph=True)
            loss = loss + sum((oracle.disturb(g) ** 2).sum() for g in dxs)
        torch.autograd.backward((2 if way == "twice" else 1) * loss, inputs=[*xs, *leaves])
        found["dx"] = xs[self.rank].grad if needs[-1] else None
        for n, norm in enumerate(oracle.norms):
            for k, name in enumerate(("weight", "bias")):
                of_ranks: list[Any] = [layers[n][k] for layers in oracle.leaves]
                if of_ranks[0] is None:
                    continue
                zero = torch.zeros(self.C, dtype=F64)
                grads = [zero if p.grad is None else p.grad for p in of_ranks]
                own: Any = grads[self.rank]
                if self.MEANS:
                    group = next(ranks for ranks in norm.groups if self.rank in ranks)
                    own = sum(grads[rank] for rank in group) / len(group)
                elif way == "penalty":  # whose gradient it is depends on whose loss
                    own = sum(grads)
                found[f"d{name}{n}"] = own if needs[n] and n in {n for n, *_ in calls} else None
        return found

    def compare(self, found: Expected, want: Expected, moved: Expected, dtype: str) -> None:
        """Raise AssertionError unless all numbers are right, up to the condition."""
        assert found.keys() == want.keys(), found.keys() ^ want.keys()
        wrong = []
        for name, right in want.items():
            got, other = found[name], moved[name]
            if right is None or got is None or other is None:
                assert got is right is None, f"{name}: got {got}, wanted {right}"
                continue
            got, right = torch.as_tensor(got).detach().double(), right.detach()
            assert got.shape == right.shape, (name, got.shape, right.shape)
            if right.numel():
                condition = (other.detach() - right).abs().max() / DELTA
                bound = TOLERANCES[dtype] * (1 + right.abs().max() + condition)
                error = (got - right).abs().max()
                if not error <= bound:
                    wrong.append(f"{name}: off by {error:.2g}, may be {bound:.2g}: {got}, {right}")
        assert not wrong, "\n".join(wrong)

    def compare_buffers(self, want: list[Buffers] | None = None, dtype: str = "float64") -> None:
        """Raise AssertionError unless the running statistics are `want`: by default, as before."""
        wanted = flat(self.buffers[self.rank] if want is None else want)
        self.compare(flat(self.own_buffers()), wanted, wanted, dtype)

    def compare_step(
        self, way: str, calls: Calls, dtype: str, sizes: Sequence[int], needs: Any = (), **how: Any
    ) -> None:
        """A step over random batches, with a mask in some, against the oracle."""
        masked = self.odds(0.3)
        self.log("  ", way, calls, dtype, "masked" * masked)
        draw = partial(self.batches, dtype, sizes, masked=masked)
        wanted = partial(self.expected, calls=calls, way=way, needs=needs)
        b, want, moved = self.until_accepted(draw, wanted)
        self.log("  ", [tuple(x.shape) for x in b.xs])
        found = self.step(b, calls, way, dtype, **how)
        self.compare(found, want, moved, self.coarsest(calls, dtype))

    def run(self, operations: int) -> None:
        """Do so many operations. Raises on all ranks what any rank found."""
        self._exchange("")
        names, weights = zip(*self.OPERATIONS.items(), strict=True)
        p = np.array(weights) / sum(weights)
        for _ in range(operations):
            name = str(self.rng.choice(names, p=p))
            self.log(name)
            error = ""
            try:
                getattr(self, f"op_{name}")()
            except Exception:
                error = traceback.format_exc()
            self._exchange(error)

    def _exchange(self, error: str) -> None:
        own = [{name: b.tolist() for name, b in of.items()} for of in self.own_buffers()]
        all_ranks = gather((error, self.rng.random(), own), self.world)
        errors: dict[str, list[int]] = {}
        for rank, (text, *_) in enumerate(all_ranks):
            errors.setdefault(text, []).append(rank)
        said = [f"rank(s) {ranks}: {text}" for text, ranks in errors.items() if text]
        assert not said, "\n".join(said)
        assert len({each[1] for each in all_ranks}) == 1, "the ranks drew unlike programs"
        self.buffers = [
            [{name: torch.tensor(v, dtype=F64) for name, v in of.items()} for of in layers]
            for _, _, layers in all_ranks
        ]


def flat(buffers: Sequence[Buffers]) -> Expected:
    """The buffers of all layers under one name each."""
    return {f"{n}.{name}": b for n, of in enumerate(buffers) for name, b in of.items()}


def shape(dims: int, N: int, C: int, L: int) -> tuple[int, ...]:
    """An input `(N, C, L)` as a layer of so many dimensions takes it."""
    k = 2 if L == 4 else 1
    return (N, C, *{3: (L,) if L > 1 else (), 4: (k, L // k), 5: (1, k, L // k)}[dims])


def run_machines(
    kind: Callable[[Communicator, int], Machine], world: Communicator, first: int = 0
) -> None:
    """Run MACHINES machines; one that fails says its seed and its operations."""
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + MACHINES):
        with warnings.catch_warnings():
            machine = kind(world, seed)
            try:
                machine.run(OPERATIONS)
            except Exception as error:
                done = "\n".join(machine.done)
                raise AssertionError(f"seed {seed}, after\n{done}\n{error}") from None
            machine.close()


def strided(a: Array) -> Array:
    """The same numbers, every second one of a wider array."""
    wide = np.full((2 * len(a), *a.shape[1:]), 77.0, a.dtype)
    wide[::2] = a
    return wide[::2]
