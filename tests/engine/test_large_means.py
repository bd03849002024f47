"""Variances beside which the square of the mean is huge: as exact as those of centred inputs."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from multibn import SingleProcess, kernels
from multibn import torch_backend as tb
from multibn.engine.masks import WEIGHTINGS
from multibn.engine.plan import NormArgs, Plan
from multibn.kernels.spec import unpack
from tests.helpers.ranks import CountingCommunicator, run_ranks
from tests.helpers.spread import spread

NEEDS = "torch"

MEANS = [1.0, 1e3, 1e6, 1e8]
WHERE = [slice(0, 3), slice(3, 3), slice(3, 9)]  # of a batch on three ranks, of which one is empty


def moments(x: Any, communicator: Any, **options: Any) -> tuple[Any, Any, int]:
    """Output and statistics of a step, and the number of messages."""
    counting = CountingCommunicator(communicator)
    mask = options.pop("mask", None)
    i = NormArgs(x, None, None, 1e-12, (0, 2), mask=mask)
    plan = Plan(i, counting, weighting=options.get("weighting", "element"))
    y, packed = plan.forward(i)
    return y, unpack(packed), len(counting.messages)


@pytest.mark.parametrize(
    "mean, weighting, masked, dtype, native",
    spread(MEANS, [*WEIGHTINGS], [False, True], over=[["float64", "float32"], [True, False]]),
)
def test_any_mean_gives_the_numbers_of_centred_inputs(
    mean: float, weighting: str, masked: bool, dtype: str, native: bool, monkeypatch: Any
) -> None:
    """Exactly as centred: the numbers are such that neither sum nor difference is rounded."""
    if not native:
        monkeypatch.setattr(kernels, "select", lambda *_: kernels.reference)
    mean = min(mean, 1e6) if dtype == "float32" else mean  # which has the integers up to 1.7e7
    rng = np.random.default_rng(0)
    centred = rng.integers(-8, 9, (9, 4, 5)) / (1.0 if dtype == "float32" else 8.0)
    centred = centred.astype(dtype)
    x = (centred + np.asarray(mean, dtype)).astype(dtype)
    mask = rng.random((9, 1, 5)) < 0.6 if masked else None
    if mask is not None:
        x[np.broadcast_to(~mask, x.shape)] = np.nan

    def on_rank(communicator: Any, of: Any) -> Any:
        rows = WHERE[communicator.rank]
        options = {"weighting": weighting, "mask": None if mask is None else mask[rows]}
        return moments(of[rows], communicator, **options)

    got, right = (run_ranks(3, partial(on_rank, of=of)) for of in (x, centred))
    u = float(np.finfo(dtype).eps)
    for (y, batch, num), (right_y, right_batch, _) in zip(got, right, strict=True):
        np.testing.assert_allclose(batch.var, right_batch.var, rtol=max(8 * u, 1e-12))
        np.testing.assert_allclose(batch.mean, right_batch.mean + mean, rtol=8 * u)
        np.testing.assert_allclose(y, right_y, rtol=0, atol=max(32 * u, 1e-12, 2e-16 * mean))
        assert num == (1 + (mean > 1e4) if dtype == "float32" else 1 + (mean > 90))
        weights = float(batch.count), float(batch.element_weight)
        assert weights == (float(right_batch.count), float(right_batch.element_weight))


def plain(c: Any, **options: Any) -> Any:
    return tb.SyncBatchNorm(4, 1e-12, momentum=1.0, process_group=c, **options).double()


def pooled(layer: Any, x: Any) -> Any:
    with tb.step_statistics(layer):
        return layer(x[:3]), layer(x[3:])


def masked(layer: Any, x: Any) -> Any:
    return layer(x, mask=torch.arange(x.shape[2]) < torch.arange(1, len(x) + 1)[:, None])


# Layers, and how to call them.
FORMS: dict[str, tuple[Any, Any]] = {
    "plain": (plain, lambda layer, x: layer(x)),
    "local counts": (
        partial(plain, weighting="rank", running_var="unbiased_local"),
        lambda layer, x: layer(x),
    ),
    "residual": (plain, lambda layer, x: layer(x, x % 8)),
    "masked": (plain, masked),
    "micro-batches": (plain, pooled),
    "compiled": (plain, lambda layer, x: torch.compile(layer, backend="aot_eager")(x)),
    "parts": (
        lambda c: tb.SubBatchNorm1d(2, 4, 1e-12, momentum=1.0, process_group=c).double(),
        lambda layer, x: layer(x),
    ),
}


@pytest.mark.parametrize(
    "form, shape",
    # Compiled code takes the same message; the second shape is one for several threads.
    [(form, (6, 4, L)) for L in (5, 40_000) for form in FORMS if (form, L) != ("compiled", 40_000)],
    ids=str,
)
def test_layers_keep_their_digits_at_large_means(form: str, shape: tuple[int, ...]) -> None:
    """Outputs, gradients of both orders, and running statistics."""
    make, call = FORMS[form]
    centred = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).double()

    def results(communicator: Any, mean: float) -> tuple[Any, Any]:
        layer = make(communicator)
        half = shape[0] // 2 * communicator.rank
        x = (centred[half:] if communicator.rank else centred[: shape[0] // 2]) + mean
        if form == "parts" or form == "micro-batches":
            x = (centred if communicator.rank else centred[:4]) + mean
        ys = call(layer, x.requires_grad_())
        y = torch.cat([v.flatten() for v in ys]) if isinstance(ys, tuple | list) else ys
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=form != "compiled")
        ddx = 0.0 if form == "compiled" else torch.autograd.grad(dx.cos().sum(), x)[0]
        with torch.no_grad():
            buffers = {k: v - mean if "mean" in k else v for k, v in layer.named_buffers()}
        return (y.detach(), dx.detach(), ddx), buffers

    # torch before 2.13 ends the process where another thread than the first traces.
    alone = form == "compiled" and torch.__version__ < "2.13"
    of_means = [
        [results(SingleProcess(), mean)] if alone else run_ranks(2, partial(results, mean=mean))
        for mean in (0.0, 1e8)
    ]
    for right, got in zip(*of_means, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-6, atol=5e-7)
