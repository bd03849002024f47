"""The part that checks the verbs for arrays of CuPy, against the array API's in float64."""

import contextlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks.gpu import names
from multibn.kernels import Gradient, Input, Running, generic

BOUNDS = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3}
VAR_EPS = 0.1


SIZES = [(8, 64, 28, 28), (8, 256, 7, 7), (256, 1000)]


def check() -> Iterator[dict[str, Any]]:
    """A row for each dtype, memory order, and way to end; the worst error of all results."""
    with _cupy() as (file, asarray):
        ends = [(False, False), (False, True), (True, True)]
        stand_ins = names.on_stand_ins()
        sizes, dtypes = ([(2, 3, 4, 5)], ["float32"]) if stand_ins else (SIZES, list(BOUNDS))
        for shape, dtype, last, (adds, relu) in product(sizes, dtypes, (False, True), ends):
            arrays = []
            for seed in range(3):
                a = np.random.default_rng(seed).standard_normal(shape).astype(dtype) + seed
                a = np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) if last else a
                arrays.append(a)
            options: Any = {"relu": relu}
            wide: Any = dict(options)
            if adds:
                options["residual"] = asarray(arrays[2])
                wide["residual"] = arrays[2].astype("f8")
            axis = tuple(i for i in range(len(shape)) if i != 1)
            x, dy = map(asarray, arrays[:2])
            got = step(file, x, dy, axis=axis, asarray=asarray, **options)
            x, dy = (a.astype("f8") for a in arrays[:2])
            right = step(generic, x, dy, axis=axis, **wide)
            errors = {}
            for name, v in right.items():
                if v is not None:
                    bound = BOUNDS[dtype] if name in ("y", "known", "dx", "dresidual") else 1e-6
                    size = np.abs(v).max() + (name in ("sums", "dweight", "dbias")) * x.size
                    host = got[name].get() if hasattr(got[name], "get") else got[name]
                    errors[name] = float(np.abs(host - v).max() / size / bound)
            worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
            yield {
                "check": f"{'x'.join(map(str, shape))} {dtype}{' channels last' if last else ''}"
                f"{', residual' if adds else ''}{', ReLU' if relu else ''}",
                "error": errors[worst], "bound": 1.0, "ok": errors[worst] <= 1, "worst": worst,
            }  # fmt: skip


def step(
    file: Any,
    x: Any,
    dy: Any,
    dtype: str | None = "float32",
    axis: tuple[int, ...] = (0, 2, 3),
    asarray: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A pass each way by the verbs of `file`, for two equal ranks: all results by name.

    `dtype` is that of weight and bias, None for neither; `asarray` makes arrays like `x` of
    NumPy's. `options` are `residual` and `relu`.
    """
    like = (lambda a: np.asarray(a).view(type(x))) if asarray is None else asarray
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    C = math.prod(shape)
    weight = bias = None
    if dtype is not None:
        weight, bias = (like(np.linspace(first, last, C).reshape(shape).astype(dtype))
                        for first, last in ((0.5, 2.0), (-1.0, 1.0)))  # fmt: skip
    zeros, ones = (like(np.full(shape, v, "float32")) for v in (0.0, 1.0))
    running = Running(zeros, ones, 0.1, num_batches=like(np.array(4)))
    n = float(x.size // C)
    i = Input(x, weight, bias, VAR_EPS, axis, running=running, **options)
    sent = file.begin_forward(i, n, n)
    y, batch, state = file.finish_forward(i, sent + sent, n, n)
    assert state == generic.RIGHT
    g = Gradient(dy, *i[:3], batch, VAR_EPS, axis, i.relu, None if i.residual is None else y)
    sums, dweight, dbias = file.begin_backward(g)
    dx, dresidual = file.finish_backward(g, sums + sums)
    known = file.normalize(i, batch)
    return {
        "sent": sent, "y": y, **batch._asdict(), "known": known, "sums": sums, "dweight": dweight,
        "dbias": dbias, "dx": dx, "dresidual": dresidual, "running_mean": running.mean,
        "running_var": running.var, "num_batches": running.num_batches,
    }  # fmt: skip


@contextlib.contextmanager
def _cupy() -> Iterator[Any]:
    """The verbs for CuPy, and what makes its arrays; or the stand-in of the tests."""
    if names.on_stand_ins():
        from tests.helpers import standin_cuda

        with standin_cuda.installed() as file:
            yield file, file.cupy.asarray
        return
    import cupy

    from multibn.kernels import cupy as file

    yield file, cupy.asarray
