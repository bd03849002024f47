"""Masks in the compiled passes: every layout, dtype and set of instructions."""

from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn.kernels import generic, host  # noqa: E402
from multibn.kernels.core import _core  # noqa: E402
from tests.kernels.passes import VERBS, Verbs, refuse, threads  # noqa: E402
from tests.kernels.test_host import SHAPES, data, per_channel  # noqa: E402

AXIS = (0, 2, 3)
# Long planes of more than one block, short samples of few channels.
MORE_SHAPES = [(3, 2, 40, 30), (2600, 3, 1, 1), (11, 13, 4, 5)]


def masks(shape: tuple[int, ...]) -> list[Any]:
    """At random; ends of samples, the last sample whole; none; all."""
    rng = np.random.default_rng(2)
    N, _, H, W = shape
    lengths = rng.integers(0, H * W + 1, N)
    lengths[-1] = H * W
    ends = np.arange(H * W) < lengths[:, None]
    none = np.zeros((N, 1, H, W), "bool")
    return [rng.random(none.shape) < 0.6, ends.reshape(none.shape), none, ~none]


def poisoned(a: Any, mask: Any) -> Any:
    """`a` with NaN, infinity and large values where the mask is False."""
    bad = np.resize(np.array([np.nan, np.inf, -np.inf, 6e4], a.dtype), a.shape)
    return np.where(mask, a, bad)


def last(a: Any) -> Any:
    return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def verbs(k: Any, arrays: Any, mask: Any, relu: bool) -> list[Any]:
    """The results of all four for x, dy and residual, by the sums that one rank sends."""
    k = Verbs(k)
    x, dy, residual = arrays
    *_, weight, bias, _, _ = per_channel(x.shape[1])
    count = float(np.count_nonzero(mask))
    on: Any = {"axis": AXIS, "mask": mask}
    message = k.begin_forward(x, count, count, **on)
    on.update(eps=0.25, relu=relu)
    y, mean, var, total, element_weight, state = k.finish_forward(
        message, x, weight, bias, count, count, residual=residual, **on
    )
    on["y"] = y if relu and residual is not None else None
    statistics = mean, var, weight, bias
    sums, dweight, dbias, *begun = k.begin_backward(dy, x, *statistics, element_weight, **on)
    dx, dresidual = k.finish_backward(sums, dy, x, *statistics, element_weight, begun=begun, **on)
    found = [message, y, mean, var, total, sums, dweight, dbias, dx]
    assert state == generic.RIGHT
    return found if dresidual is None else [*found, dresidual]


@pytest.mark.parametrize("layout", [np.asarray, last], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("shape", [*SHAPES[:-1], *MORE_SHAPES], ids=str)
@pytest.mark.parametrize(
    "dtype, rtol", [("float32", 1e-5), ("float64", 1e-12), ("float16", 2e-3)], ids=str
)
def test_masked_elements_take_no_part_in_any_verb(
    shape: tuple[int, ...], dtype: str, rtol: float, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy, residual = (data(shape, dtype, seed) for seed in range(3))
    for mask in masks(shape):
        for relu, added in [(False, None), (False, residual), (True, None), (True, residual)]:
            arrays: list[Any] = [x, dy, residual if added is None else added]
            clean: list[Any] = [np.where(mask, a, 0).astype("float64") for a in arrays]
            arrays = [layout(poisoned(a, mask)) for a in arrays]
            if added is None:
                clean[2] = arrays[2] = None
            expected = verbs(generic, clean, mask, relu)
            with monkeypatch.context() as patch:
                for name in VERBS:
                    patch.setattr(generic, name, refuse)
                got = verbs(host, arrays, mask, relu)
            # A sign that rounding turns around changes elements of dx, and sums.
            compared = 5 if relu and dtype != "float64" else len(got)
            for one, other in list(zip(got, expected, strict=True))[:compared]:
                scale = max(np.abs(other).max(initial=0), 1e-3)
                np.testing.assert_allclose(one, other, rtol=0, atol=4 * rtol * scale)
            for one in (got[1], *got[8:]):
                assert not np.where(mask, 0, one).any()
            assert all(np.isfinite(one).all() for one in got)


@pytest.mark.parametrize("level", range(len(_core.levels)))
def test_masks_give_the_same_numbers_with_all_instructions(level: int) -> None:
    for shape in [(6, 7, 13, 11), (37, 3, 2, 2), (19, 2100, 1, 1)]:
        x, dy, residual = (data(shape, seed=seed) for seed in range(3))
        mask = masks(shape)[0]
        x, dy = (poisoned(a, mask) for a in (x, dy))
        expected = verbs(host, (x, dy, residual), mask, True)
        try:
            _core.use_level(level)
            found = verbs(host, (x, dy, residual), mask, True)
        finally:
            _core.use_level(len(_core.levels) - 1)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_masks_give_the_same_bits_with_any_threads() -> None:
    # The first is large enough to leave past the caches, and a thread's third of it is not.
    for shape in [(9, 64, 64, 64), (2, 70, 100, 90), (30000, 40, 1, 1)]:
        x, dy = data(shape), data(shape, seed=1)
        mask = masks(shape)[0]
        x[:1] += 1e4  # the first centre is far from the mean
        found = []
        for n in (1, 3):
            with threads(n):
                found.append(verbs(host, (poisoned(x, mask), poisoned(dy, mask), None), mask, True))
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_masks_may_be_views_or_in_another_memory_order() -> None:
    x, dy = data((4, 3, 8, 6)), data((4, 3, 8, 6), seed=1)
    mask = masks(x.shape)[0]
    for view in (lambda a: a.transpose(0, 1, 3, 2), lambda a: a[:, :, ::2], lambda a: a[::-1]):
        there = view(mask)
        arrays: Any = [view(poisoned(a, mask)) for a in (x, dy)]
        clean: Any = [np.where(there, a, 0) for a in arrays]
        expected = verbs(generic, [*clean, None], there, False)
        for one, other in zip(verbs(host, [*arrays, None], there, False), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
