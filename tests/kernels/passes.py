"""A pass of a layer each way by a kernels file, against its definition in float64.

Where Triton interprets or a GPU is at hand, the fixture has the Triton kernels: see test_cuda.py.
"""

import importlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from multibn.kernels import BatchStatistics, Gradient, NormArgs, Running, reference
from multibn.kernels.spec import CANCELLED, OK, pack_statistics, unpack
from tests.helpers import require

INTERPRETED = os.environ.get("TRITON_INTERPRET")
DEVICE = "cuda" if INTERPRETED == "0" else "cpu"
AXIS = (0, 2, 3)
EPS = 0.25
VERBS = "begin_forward", "finish_forward", "begin_backward", "finish_backward", "normalize"
# Of the largest number: of activations, and of sums, which 16-bit dtypes have in float32.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def takes_int_of_an_array() -> bool:
    """Triton 3.6 does so, and 3.9 does no more; NumPy 2.5 refuses this."""
    if not require.available("triton"):
        return False
    triton = tuple(int(n) for n in metadata.version("triton").split(".")[:2])
    return triton < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.5.0"


def _patch_the_interpreter_once() -> None:
    """Let Triton's interpreter patch its language at each launch, and not at each inner call.

    The launch has patched the language for all functions of its own module, and patches of Triton's
    library stay. To look for what is to be patched takes longer than most functions.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED == "1":
    _patch_the_interpreter_once()


@pytest.fixture(params=["reference", "cpu"] if INTERPRETED is None else ["cuda"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """Each kernels file that can be used."""
    if request.param == "cpu":
        require.need("core")
    return importlib.import_module(f"multibn.kernels.{request.param}")


def as_numpy(v: Any, dtype: str | None = None) -> Any:
    return v if v is None or dtype is None else v.astype(dtype)


def as_torch(v: Any, dtype: str | None = None) -> Any:
    """The same memory as a tensor, if it is to be of the same dtype; None and tensors stay."""
    require.need("torch")
    import torch

    if v is None or isinstance(v, torch.Tensor):
        return v
    return torch.from_numpy(np.asarray(v)).to(DEVICE, getattr(torch, dtype) if dtype else None)


LIBRARIES: list[Any] = [as_torch] if INTERPRETED is not None else [as_numpy, as_torch]
libraries = pytest.mark.parametrize("of", LIBRARIES, ids=lambda f: f.__name__[3:])


def like(x: Any, v: Any) -> Any:
    return v if isinstance(x, np.ndarray) else as_torch(v)


def exact(v: Any) -> Any:
    """An array in float64; None stays."""
    if v is None:
        return None
    return np.asarray(v.detach().cpu().double() if hasattr(v, "detach") else v, "float64")


def data(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(3, 2, shape).astype(dtype)


def last(a: Any) -> Any:
    """The array with the second axis last in memory."""
    return np.moveaxis(np.moveaxis(a, 1, -1).copy(), -1, 1)


def cast(v: Any, dtype: str | None) -> Any:
    if dtype is None:
        return None
    return np.repeat(v, 2)[::2] if dtype == "strided" else v.astype(dtype)


def layer(
    shape: tuple[int, ...],
    dtype: str = "float32",
    of: Any = LIBRARIES[0],
    *,
    axis: tuple[int, ...] | None = None,
    order: Any = np.asarray,
    parameters: tuple[str | None, str | None] = ("float32", "float64"),
    residual: bool = False,
    relu: bool = False,
    mask: Any = None,
) -> tuple[Any, Any]:
    """The arguments of a pass, and a gradient. What the mask leaves out is spoiled."""
    axis = tuple(i for i in range(len(shape)) if i != 1) if axis is None else axis
    arrays = [data(shape, seed=seed) for seed in range(3)]
    if mask is not None:
        bad = np.resize(np.array([np.nan, np.inf, -np.inf, 6e4], "float32"), shape)
        arrays = [np.where(mask, a, bad) for a in arrays]
    x, dy, added = (of(order(a), dtype) for a in arrays)
    channels = [n for i, n in enumerate(shape) if i not in axis]
    drawn = np.random.default_rng(1).normal(1, 1, (2, *channels))
    weight, bias = (of(cast(v, kind)) for v, kind in zip(drawn, parameters, strict=True))
    there = None if mask is None else of(mask)
    others: Any = {"relu": relu, "mask": there, "residual": added if residual else None}
    return NormArgs(x, weight, bias, EPS, axis, **others), dy


def others_of(i: NormArgs) -> dict[str, Any]:
    """Each field of `NormArgs` has another value than `i`, which is of shape (4, 3, 5)."""
    arrays = {"x": data((4, 3, 5), seed=7), "residual": data((4, 3, 5), seed=8)}
    arrays |= {"weight": np.linspace(-1, 2, 3), "bias": np.linspace(0.5, -2, 3)}
    arrays |= {"mask": np.arange(20).reshape(4, 1, 5) % 3 > 0}
    others = {"eps": 3 * EPS, "axis": (0, 1), "relu": True}
    return others | {name: like(i.x, v) for name, v in arrays.items()}


def statistics(i: NormArgs, **changed: Any) -> BatchStatistics:
    """Statistics of no data in particular."""
    shape = tuple(n for k, n in enumerate(i.x.shape) if k not in i.axis)
    mean, var = np.random.default_rng(2).uniform(0.5, 2, (2, *shape))
    found = {"mean": mean, "var": var, "count": np.array(9.0), "element_weight": np.array(0.3)}
    return BatchStatistics(*(like(i.x, v) for v in (found | changed).values()))


def num_elements(i: NormArgs) -> float:
    """The number of elements per channel."""
    if i.mask is not None:
        return float(i.mask.sum())
    return float(math.prod(i.x.shape[k] for k in i.axis))


def others(C: int) -> tuple[Any, Any]:
    """What another rank sends: the payloads forward and backward."""
    mean, var = np.linspace(1, 4, C), np.linspace(0.5, 2, C)
    return 2 * np.r_[mean, var + mean * mean, 1, 1], np.linspace(-3, 5, 2 * C)


def passes(
    kernels: Any, i: NormArgs, dy: Any, batch: BatchStatistics | None = None, sums: Any = None
) -> dict[str, Any]:
    """All results, by the verbs one after the other; by statistics and sums that are given."""
    found: dict[str, Any] = {}
    n = num_elements(i)
    found["message"] = message = kernels.begin_forward(i, n, n)
    forward, backward = (like(i.x, v) for v in others((len(message) - 2) // 2))
    if batch is None:
        old = [like(i.x, np.full(len(forward) // 2 - 1, v, "float32")) for v in (1, 2)]
        moved = i._replace(running=Running(old[0], old[1], 0.3, num_batches=like(i.x, np.array(3))))
        y, packed, state = kernels.finish_forward(moved, message + forward, n, n)
        assert state in (OK, CANCELLED)
        found |= {"y": y, **unpack(packed)._asdict(), "running mean": old[0], "running var": old[1]}
        coefficients, *_ = kernels.finish_forward(i, message + forward, n, n, coefficients=True)
        found["by coefficients"] = by_coefficients(i, coefficients)
    else:
        packed = pack_statistics(batch)
    found["normalized"] = kernels.normalize(i, packed)
    coefficients = kernels.normalize(i, packed, coefficients=True)
    found["normalized by coefficients"] = by_coefficients(i, coefficients)
    y = found.setdefault("y", found["normalized"])
    g = Gradient(dy, i, packed, y if i.relu and i.residual is not None else None)
    payload, found["dweight"], found["dbias"], *begun = kernels.begin_backward(g)
    found["sums"] = payload
    summed = payload + backward if sums is None else sums
    found["dx"], found["dresidual"] = kernels.finish_backward(g, summed, *begun)
    coefficients, _ = kernels.finish_backward(g, summed, *begun, coefficients=True)
    before_relu = np.where((exact(y) > 0) | (not i.relu), exact(dy), 0)
    found["dx by coefficients"] = by_coefficients(i, coefficients, before_relu)
    return found


def by_coefficients(i: NormArgs, coefficients: Any, dy: Any = None) -> Any:
    """The array that compiled code makes of coefficients, before the residual and the ReLU."""
    centre, scale, *of_dy, shift = (np.expand_dims(exact(v), i.axis) for v in coefficients)
    made = (exact(i.x) - centre) * scale + shift
    made = made if dy is None else made + dy * of_dy[0]
    return like(i.x, made if i.mask is None else np.where(exact(i.mask) > 0, made, 0))


def definition(
    i: NormArgs, dy: Any, y: Any, batch: BatchStatistics | None = None, sums: Any = None
) -> dict[str, Any]:
    """What `passes` gives, in float64. A ReLU has no gradient where `y` was not positive."""
    x, dy, y = exact(i.x), exact(dy), exact(y)
    mask = np.ones(x.shape, bool) if i.mask is None else np.broadcast_to(exact(i.mask) > 0, x.shape)
    x, dy = np.where(mask, x, 0), np.where(mask & ((y > 0) | (not i.relu)), dy, 0)
    n = num_elements(i)
    moments = [v.sum(i.axis) / max(n, 1) for v in (x, x * x)]
    shape, C = moments[0].shape, moments[0].size
    found = {"message": n * np.r_[moments[0].ravel(), moments[1].ravel(), 1, 1]}
    forward, backward = others(C)
    if batch is None:
        summed = found["message"] + forward
        first, second, (weight, count) = np.split(summed, [C, 2 * C])
        mean, var = first / weight, second / weight - (first / weight) ** 2
        found["running mean"] = 0.7 * 1 + 0.3 * mean
        found["running var"] = 0.7 * 2 + 0.3 * var * count / max(count - 1, 1)
        mean, var = mean.reshape(shape), var.reshape(shape)
        element_weight = n / (max(n, 1) * weight)
        found |= {"mean": mean, "var": var, "count": count, "element_weight": element_weight}
    else:
        mean, var, _, element_weight = map(exact, batch)

    def wide(v: Any, missing: float = 0.0) -> Any:
        return missing if v is None else np.expand_dims(exact(v), i.axis)

    invstd = 1 / np.sqrt(wide(var) + i.eps)
    xhat = (x - wide(mean)) * invstd
    out = xhat * wide(i.weight, 1.0) + wide(i.bias)
    found["normalized by coefficients"] = np.where(mask, out, 0)
    if batch is None:
        found["by coefficients"] = found["normalized by coefficients"]
    out = out + (0.0 if i.residual is None else exact(i.residual))
    out = np.where(mask, np.where(i.relu & (out <= 0), 0, out), 0)
    found |= {"y": out, "normalized": out}
    of_rank = [v.sum(i.axis) for v in (dy, dy * xhat)]
    found["sums"] = np.r_[of_rank[0].ravel(), of_rank[1].ravel()]
    found["dbias"], found["dweight"] = (
        None if parameter is None else v
        for parameter, v in zip((i.bias, i.weight), of_rank, strict=True)
    )
    summed = found["sums"] + backward if sums is None else exact(sums)
    sum_dy, sum_dy_xhat = (wide(v.reshape(shape)) for v in np.split(summed, [C]))
    dx = wide(i.weight, 1.0) * invstd * (dy - element_weight * (sum_dy + xhat * sum_dy_xhat))
    found["dx"] = found["dx by coefficients"] = np.where(mask, dx, 0)
    found["dresidual"] = dy if i.relu and i.residual is not None else None
    return found


NARROW = "y", "normalized", "dx", "dresidual"


def check(
    kernels: Any,
    i: NormArgs,
    dy: Any,
    batch: BatchStatistics | None = None,
    sums: Any = None,
    *,
    native: bool = True,
    tolerance: float | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """All results, which are near their definition; `native` if `reference` is to have no part.

    Results have the dtypes and the memory order of their arrays; arguments stay as they are.
    """
    before = [exact(v) for v in (*i[:3], i.residual, dy)]
    with only(kernels) if native else pytest.MonkeyPatch.context():
        got = passes(kernels, i, dy, batch, sums)
    for name, right in definition(i, dy, got["y"], batch, sums).items():
        where = f"{kernels.__name__}: {name} of {tuple(i.x.shape)} {i.x.dtype} {hint}"
        value = got[name]
        if right is None:
            assert value is None, where
            continue
        assert type(value) is type(like(i.x, np.ones(1))) or np.shape(value) == (), where
        dtype = i.x.dtype if name in NARROW else getattr(value, "dtype", "float64")
        if name in ("dweight", "dbias"):
            dtype = getattr(i, name[1:]).dtype
        assert value.dtype == dtype, where
        assert tuple(value.shape) == np.shape(right), where
        kinds = [str(v).rpartition(".")[2] for v in (dtype, i.x.dtype)]
        limits = [TOLERANCE[kind] for kind in kinds]
        if name not in NARROW and limits[1] > TOLERANCE["float32"]:
            limits[1] = TOLERANCE["float32"]
        right = np.where(np.isinf(right), np.nan, right)  # overflow may come before inf - inf
        value = np.where(np.isinf(exact(value)), np.nan, exact(value))
        limit = max(limits) if tolerance is None else tolerance
        scale = np.nanmax(np.abs(right), initial=1e-3)
        np.testing.assert_allclose(value, right, rtol=0, atol=limit * scale, err_msg=where)
    for a, b in zip((*i[:3], i.residual, dy), before, strict=True):
        np.testing.assert_array_equal(exact(a), b)
    return got


def strides(a: Any) -> list[int]:
    """The strides of axes that have more than one element: those of other axes mean nothing."""
    steps = a.stride() if hasattr(a, "stride") else [n // a.itemsize for n in a.strides]
    return [step for step, n in zip(steps, a.shape, strict=True) if n > 1]


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the reference kernels were used")


@contextmanager
def only(kernels: Any) -> Iterator[None]:
    """The verbs of the reference raise, if `kernels` are not the reference."""
    with pytest.MonkeyPatch.context() as patch:
        for name in VERBS if kernels is not reference else ():
            patch.setattr(reference, name, refuse)
        yield


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Threads, set as torch or OMP_NUM_THREADS set them."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else os.environ.get("OMP_NUM_THREADS", "")

    def use(n: Any) -> None:
        if torch:
            torch.set_num_threads(n)
        else:
            os.environ["OMP_NUM_THREADS"] = str(n)

    use(n)
    try:
        yield
    finally:
        use(before)
