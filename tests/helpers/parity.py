"""Every surface against the oracle: several steps of training on a split batch."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from multibn.communicators import Communicator
from tests.helpers import reference, require
from tests.helpers.reference import Array, relative_error
from tests.helpers.surfaces import SURFACES

CHANNELS = 5
STEPS = 5
EPS = 1e-5
MOMENTUM = 0.2

# What a rank's batch looks like, from its rank and the number of ranks.
SPLITS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "even": lambda rank, size: (4, CHANNELS, 5, 3),
    "uneven": lambda rank, size: (1 + 3 * rank, CHANNELS, 5, 3),
    "empty": lambda rank, size: (0 if rank == size // 2 else 3, CHANNELS, 5, 3),
    "spatial": lambda rank, size: (3, CHANNELS, 2 + 2 * rank, 7 - rank),
}

# Largest errors, relative to the largest entry: of y, dx and statistics, and of dweight and dbias.
BOUNDS = {"float32": (2e-6, 1e-5), "float64": (1e-11, 1e-11)}


def batches(split: str, size: int, dtype: str, seed: int) -> tuple[list[Array], list[Array]]:
    """All ranks' inputs and output gradients; the same on every rank."""
    rng = np.random.default_rng(seed)
    shapes = [SPLITS[split](rank, size) for rank in range(size)]
    offset = rng.normal(size=(1, CHANNELS, 1, 1))
    xs = [(offset + 2 * rng.normal(size=s)).astype(dtype) for s in shapes]
    dys = [rng.normal(size=s).astype(dtype) for s in shapes]
    return xs, dys


def compare_with_oracle(
    framework: str,
    split: str,
    dtype: str,
    communicator: Communicator,
    weighting: str = "element",
    running_var: str = "unbiased_global",
) -> None:
    """Train `STEPS` steps and compare everything, once all communication is over."""
    rng = np.random.default_rng(1)
    weight = rng.normal(1, 0.3, CHANNELS).astype(dtype)
    bias = rng.normal(0, 0.3, CHANNELS).astype(dtype)
    layer = SURFACES[framework](
        weight,
        bias,
        communicator,
        eps=EPS,
        momentum=MOMENTUM,
        weighting=weighting,
        running_var=running_var,
    )
    rank, size = communicator.rank, communicator.size
    running = np.zeros(CHANNELS), np.full(CHANNELS, layer.initial_var)
    errors: dict[str, float] = {}

    def note(name: str, got: Any, expected: Array) -> None:
        errors[name] = max(errors.get(name, 0.0), relative_error(got, expected))

    for step in range(STEPS):
        xs, dys = batches(split, size, dtype, seed=step)
        expected = reference.batch_norm(xs, dys, weight, bias, eps=EPS, weighting=weighting)
        got = layer.train(xs[rank], dys[rank])
        note("y", got.y, expected.y[rank])
        note("dx", got.dx, expected.dx[rank])
        note("dweight", got.dweight, expected.dweight)
        note("dbias", got.dbias, expected.dbias)
        m = xs[rank][:, 0].size
        factor = {
            "unbiased_global": expected.count / (expected.count - 1),
            "unbiased_local": m / max(m - 1, 1),
            "biased": 1.0,
        }[running_var]
        running = reference.running(running, expected.mean, expected.var, factor, MOMENTUM)
        assert got.y.dtype == got.dx.dtype == np.dtype(dtype)
    mean, var = layer.running()
    note("running_mean", mean, running[0])
    note("running_var", var, running[1])
    x = xs[rank]
    shape = (1, CHANNELS, 1, 1)
    evaluated = (x - running[0].reshape(shape)) / np.sqrt(running[1].reshape(shape) + EPS)
    note("eval", layer.evaluate(x), evaluated * weight.reshape(shape) + bias.reshape(shape))

    bound, sums_bound = BOUNDS[dtype]
    bounds = {name: sums_bound if name in ("dweight", "dbias") else bound for name in errors}
    assert all(errors[name] <= bounds[name] for name in errors), (errors, bounds)


def frameworks() -> list[str]:
    """Those that are installed."""
    return [name for name in SURFACES if require.available(name)]


def cases() -> list[tuple[str, str, str]]:
    return list(product(frameworks(), SPLITS, BOUNDS))
