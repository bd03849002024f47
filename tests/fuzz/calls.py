"""Layer calls made up at random, for either framework; `judging` says what must come of them.

A `Call` is one step of one layer on one to four ranks: shapes, memory layouts, dtypes, values and
options.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from multibn import kernels
from multibn.engine.masks import WEIGHTINGS

Array = NDArray[Any]

CALLS = int(os.environ.get("MULTIBN_FUZZ", "150"))  # layer calls of each test; a fifth, of files

FLOATS = ("float32", "float64", "float16")
NOT_FLOATS = ("int64", "int32", "uint8", "bool", "complex64")
LAYOUTS = ("dense", "permuted", "sliced", "flipped", "expanded", "overlapping", "offset")
VALUES = ("normal", "constant", "shifted", "zeros", "tiny", "subnormal", "large", "ints")
NOT_FINITE = ("nan", "inf", "-inf", "huge")


@dataclass(frozen=True)
class Activation:
    """What one rank passes."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    values: str
    counts: float | None = None  # which part of the elements, at random; None without a mask


@dataclass(frozen=True)
class Call:
    num_channels: int
    ranks: tuple[Activation, ...]
    train: bool
    momentum: float | None
    eps: float
    weighting: str
    running_var: str
    parameters: tuple[bool, bool]  # whether there are weight and bias
    parameter_dtype: str
    tracked: bool
    needs: tuple[bool, bool, bool]  # which of x, weight and bias need a gradient
    dy_layout: str
    dy_values: str
    reference: bool
    seed: int


def _mostly(draw: Any, usual: Any, *unusual: Any, odds: int = 8) -> Any:
    return draw(st.sampled_from((usual,) * odds + unusual))


@st.composite
def calls(draw: Any, dtypes: tuple[str, ...]) -> Call:
    """One rank in some has another dtype, a wrong shape, or values that are not finite."""
    num_channels = draw(st.integers(1, 5))
    usual_dtype = draw(st.sampled_from(dtypes))
    usual_values = draw(st.sampled_from(VALUES))
    ndim = draw(st.integers(2, 6))
    masked = _mostly(draw, False, True, odds=3)
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4, 5, 0)), min_size=ndim, max_size=ndim))
        shape = (sizes[0], num_channels, *sizes[2:])
        if draw(st.integers(0, 39)) == 0:  # not what the layer was made for
            shape = tuple(draw(st.lists(st.integers(0, 3), max_size=6)))
        dtype = usual_dtype
        if draw(st.integers(0, 39)) == 0:
            dtype = draw(st.sampled_from((*dtypes, *NOT_FLOATS)))
        values = usual_values
        if draw(st.integers(0, 19)) == 0:
            values = draw(st.sampled_from(VALUES + NOT_FINITE))
        layout = draw(st.sampled_from(LAYOUTS))
        counts = _mostly(draw, 0.6, 0.0, 0.1, 1.0, odds=3) if masked else None
        ranks.append(Activation(shape, dtype, layout, values, counts))
    return Call(
        num_channels,
        tuple(ranks),
        train=_mostly(draw, True, False, odds=4),
        momentum=draw(st.sampled_from((0.1, None, 0.0, 1.0))),
        eps=draw(st.sampled_from((1e-5, 2e-5, 1e-3, 1.0, 1e-12))),
        weighting=_mostly(draw, *WEIGHTINGS, odds=2),
        running_var=_mostly(draw, "unbiased_global", "unbiased_local", "biased", odds=2),
        parameters=draw(st.sampled_from(((True, True),) * 4 + ((True, False), (False, False)))),
        parameter_dtype=_mostly(draw, "float32", *FLOATS, odds=2),
        tracked=_mostly(draw, True, False),
        needs=draw(st.tuples(*[st.sampled_from((True, True, False))] * 3)),
        dy_layout=draw(st.sampled_from(LAYOUTS)),
        dy_values=_mostly(draw, "normal", "zeros", "tiny", "large", "constant", "nan", odds=4),
        reference=_mostly(draw, False, True, odds=2),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Values in float64. "large" is still fine in float32, not in float16, "huge" in none."""
    x = np.asarray(rng.normal(size=shape))
    if kind == "constant":
        x = np.full(shape, rng.normal())
    elif kind == "shifted":
        x = x + 10.0 ** rng.integers(1, 9)
    elif kind == "ints":
        x = rng.integers(-4, 5, shape).astype(float)
    elif kind in ("nan", "inf", "-inf"):
        x.flat[: 1 + x.size // 4] = float(kind)
    else:
        x = x * {
            "normal": 1.0, "zeros": 0.0, "tiny": 1e-4, "subnormal": 1e-40, "large": 1e4,
            "huge": 1e300,
        }[kind]  # fmt: skip
    return x


def mask_of(a: Activation, rng: np.random.Generator) -> Array | None:
    """Which elements count, `(N, *spatial)`; None for all, and for an input without channels."""
    if a.counts is None or len(a.shape) < 2:
        return None
    return np.asarray(rng.random((a.shape[0], *a.shape[2:])) < a.counts)


def padded(x: Array, a: Activation, mask: Array | None, rng: np.random.Generator) -> Array:
    """`x`, and anything in the elements that do not count, unless the layout repeats elements."""
    if mask is not None and a.layout not in ("expanded", "overlapping"):
        np.moveaxis(x, 1, -1)[~mask] = rng.choice([0.0, 1e30, np.nan, -np.inf])
    return x


def laid_out(a: Array, layout: str, rng: np.random.Generator) -> Array:
    """The values of `a` (but for those that a layout repeats) in other memory."""
    if a.ndim == 0:
        return a
    if layout == "permuted":
        order = rng.permutation(a.ndim)
        return np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order))
    if layout == "sliced":
        wide = np.full([2 * n + 1 for n in a.shape], 77).astype(a.dtype)
        view = wide[tuple(slice(1, 1 + 2 * n, 2) for n in a.shape)]
    elif layout == "flipped":
        back = (slice(None, None, -1),) * a.ndim
        view = np.empty(a.shape, a.dtype)[back]
    elif layout == "offset":
        view = np.empty(a.size + 3, a.dtype)[3:].reshape(a.shape)
    elif layout == "expanded" and a.ndim and a.size:
        row = a[..., :1].copy()
        return np.lib.stride_tricks.as_strided(row, a.shape, (*row.strides[:-1], 0))
    elif layout == "overlapping" and a.size:
        memory = a.reshape(-1)[: sum(n - 1 for n in a.shape) + 1].copy()
        return np.lib.stride_tricks.as_strided(memory, a.shape, (a.itemsize,) * a.ndim)
    else:
        return a
    view[...] = a
    return view


@contextmanager
def kernels_used(reference: bool) -> Iterator[None]:
    """The native passes, or the reference's, as MULTIBN_KERNELS says."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MULTIBN_KERNELS", "reference" if reference else "")
            kernels._native.cache_clear()
            yield
    finally:
        kernels._native.cache_clear()
