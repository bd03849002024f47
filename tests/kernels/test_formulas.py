"""Every formula per channel, on plain numbers: the reference, the C core and Triton give the same.

The formulas stand in three languages. A test of this file fails with the name of the formula and of
the file that differs. test_cuda.py runs this file where Triton interprets or a GPU is at hand.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import require

require.need("core", "torch")

import torch  # noqa: E402

from multibn.kernels import BatchStatistics, Gradient, Input, Running, generic, host  # noqa: E402

KERNELS: list[Any] = [generic, host]
DEVICE = "cpu"
if (interpreted := os.environ.get("TRITON_INTERPRET")) is not None:
    from multibn.kernels import cuda
    from tests.kernels.passes import patch_the_interpreter_once

    KERNELS.append(cuda)
    DEVICE = "cpu" if interpreted == "1" else "cuda"
    if DEVICE == "cpu":
        patch_the_interpreter_once()

C, EPS = 3, 0.25
X = [[0.5, -1.0, 7.0], [2.5, 0.25, 7.0], [-4.0, 3.0, 7.0], [1.0, 1.5, 7.0]]  # four samples
DY = [[1.0, 0.5, -2.0], [-0.25, 4.0, 1.0], [3.0, -1.5, 0.5], [0.75, 2.0, 0.125]]
WEIGHT, BIAS = [1.5, -0.5, 2.0], [0.25, 3.0, -1.0]
MEAN, VAR = [0.75, -0.5, 6.0], [2.0, 0.5, 0.0]
# The sums of all ranks' payloads: the last channel's variance is below 0 by rounding.
FIRST, SECOND = [4.0, -12.0, 16.0], [40.0, 24.0, 31.5]
TOTAL_WEIGHT, TOTAL, RANK_WEIGHT, COUNT = 8.0, 20.0, 3.0, 4.0
ELEMENT_WEIGHT, SUM_DY, SUM_DY_XHAT = 0.05, [6.0, -3.0, 0.5], [1.25, 9.0, -7.0]
OLD_MEAN, OLD_VAR = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]

Formula = Callable[[Any], tuple[Any, Any]]  # of the kernels: numbers got and expected
FORMULAS: dict[str, Formula] = {}


def formula(name: str) -> Callable[[Formula], Formula]:
    return lambda function: FORMULAS.setdefault(name, function)


def wide(v: Any) -> Any:
    return torch.tensor(v, dtype=torch.float64, device=DEVICE)


def activation(rows: Any) -> Any:
    return wide(rows).reshape(len(rows), C, 1, 1)


def layer(**options: Any) -> Input:
    return Input(activation(X), wide(WEIGHT), wide(BIAS), EPS, (0, 2, 3), **options)


def batch(of: Any = (MEAN, VAR, TOTAL, ELEMENT_WEIGHT)) -> BatchStatistics:
    return BatchStatistics(*map(wide, of))


def gradient(**options: Any) -> Gradient:
    return Gradient(activation(DY), layer(**options), batch())


def unpacked(kernels: Any, total_weight: float = TOTAL_WEIGHT, count: float = COUNT) -> Any:
    summed = wide([*FIRST, *SECOND, total_weight, TOTAL])
    return kernels.finish_forward(layer(), summed, RANK_WEIGHT, count)[1]


def moved(kernels: Any, total: float = TOTAL, count: float = COUNT, **options: Any) -> Running:
    running = Running(wide(OLD_MEAN), wide(OLD_VAR), **{"momentum": 0.25, **options})
    # About 0, so that no variance is lost beside its mean.
    summed = wide([*MEAN, *(v + m * m for v, m in zip(VAR, MEAN, strict=True)), 1.0, total])
    kernels.finish_forward(layer(running=running), summed, RANK_WEIGHT, count)
    return running


def towards(old: Any, new: Any, momentum: float = 0.25, factor: float = 1.0) -> Any:
    pairs = zip(old, new, strict=True)
    return [(1 - momentum) * a + momentum * b * factor for a, b in pairs]


def column(rows: Any, c: int) -> Any:
    return [row[c] for row in rows]


@formula("moments of this rank")
def _moments(kernels: Any) -> Any:
    means = [math.fsum(column(X, c)) / len(X) for c in range(C)]
    squares = [math.fsum(x * x for x in column(X, c)) / len(X) for c in range(C)]
    expected = [RANK_WEIGHT * v for v in (*means, *squares)]
    return kernels.begin_forward(layer(), RANK_WEIGHT, COUNT)[: 2 * C], expected


@formula("mean")
def _mean(kernels: Any) -> Any:
    return unpacked(kernels).mean, [v / TOTAL_WEIGHT for v in FIRST]


@formula("variance, which is never below 0")
def _variance(kernels: Any) -> Any:
    pairs = zip(FIRST, SECOND, strict=True)
    expected = [max(b / TOTAL_WEIGHT - (a / TOTAL_WEIGHT) ** 2, 0.0) for a, b in pairs]
    assert expected[-1] == 0
    return unpacked(kernels).var, expected


@formula("mean where no rank has a weight")
def _no_weight(kernels: Any) -> Any:
    return unpacked(kernels, total_weight=0.0).mean, FIRST


@formula("weight of an element")
def _element_weight(kernels: Any) -> Any:
    return unpacked(kernels).element_weight, RANK_WEIGHT / (COUNT * TOTAL_WEIGHT)


@formula("weight of an element on an empty rank")
def _element_weight_of_nothing(kernels: Any) -> Any:
    return unpacked(kernels, count=0.0).element_weight, RANK_WEIGHT / TOTAL_WEIGHT


@formula("output")
def _output(kernels: Any) -> Any:
    expected = [
        (x - m) / math.sqrt(v + EPS) * w + b
        for row in X
        for x, m, v, w, b in zip(row, MEAN, VAR, WEIGHT, BIAS, strict=True)
    ]
    return kernels.normalize(layer(), batch()).reshape(-1), expected


def backward_sums() -> Any:
    sums = [math.fsum(column(DY, c)) for c in range(C)]
    products = [
        math.fsum(dy * (x - MEAN[c]) for dy, x in zip(column(DY, c), column(X, c), strict=True))
        / math.sqrt(VAR[c] + EPS)
        for c in range(C)
    ]
    return sums, products


@formula("sums of a gradient")
def _sums(kernels: Any) -> Any:
    sums, products = backward_sums()
    return kernels.begin_backward(gradient())[0][: 2 * C], [*sums, *products]


@formula("gradient of the weight")
def _dweight(kernels: Any) -> Any:
    return kernels.begin_backward(gradient())[1], backward_sums()[1]


@formula("gradient of the bias")
def _dbias(kernels: Any) -> Any:
    return kernels.begin_backward(gradient())[2], backward_sums()[0]


@formula("gradient of the input")
def _dx(kernels: Any) -> Any:
    expected = []
    for row, gradients in zip(X, DY, strict=True):
        for c in range(C):
            invstd = 1 / math.sqrt(VAR[c] + EPS)
            shared = SUM_DY[c] + (row[c] - MEAN[c]) * invstd * SUM_DY_XHAT[c]
            expected.append(WEIGHT[c] * invstd * (gradients[c] - ELEMENT_WEIGHT * shared))
    begun = kernels.begin_backward(gradient())[3:]
    dx, _ = kernels.finish_backward(gradient(), wide([*SUM_DY, *SUM_DY_XHAT]), *begun)
    return dx.reshape(-1), expected


@formula("running mean")
def _running_mean(kernels: Any) -> Any:
    return moved(kernels).mean, towards(OLD_MEAN, MEAN)


@formula("running mean, momentum=None")
def _cumulative(kernels: Any) -> Any:
    batches = torch.tensor(3, device=DEVICE)
    running = moved(kernels, momentum=None, num_batches=batches)
    assert batches == 4
    return running.mean, towards(OLD_MEAN, MEAN, momentum=1 / 4)


def _running_var(convention: Any, total: float, count: float, factor: float) -> Formula:
    def numbers(kernels: Any) -> Any:
        running = moved(kernels, total, count, convention=convention)
        return running.var, towards(OLD_VAR, VAR, factor=factor)

    return numbers


for convention, total, count, factor in (
    ("unbiased_global", 20.0, 4.0, 20 / 19),
    ("unbiased_global", 1.5, 1.5, 1.5),
    ("unbiased_local", 20.0, 4.0, 4 / 3),
    ("unbiased_local", 20.0, 1.0, 1.0),
    ("biased", 20.0, 4.0, 1.0),
):
    name = f"running variance, {convention}, {count:g} of {total:g} elements"
    FORMULAS[name] = _running_var(convention, total, count, factor)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.__name__.rpartition(".")[2])
def test_each_formula_is_the_same_in_all_kernels(
    name: str, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is not generic:  # which would take what its own code cannot
        for verb in ("begin_forward", "finish_forward", "begin_backward", "finish_backward"):
            monkeypatch.setattr(generic, verb, None)
        monkeypatch.setattr(generic, "normalize", None)
    got, expected = FORMULAS[name](kernels)
    torch.testing.assert_close(
        got.cpu(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-13,
        msg=lambda text: f"the formula of `{name}` differs in {kernels.__name__}:\n{text}",
    )
