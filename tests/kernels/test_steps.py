"""All kernels: what a message means, and how running statistics move.

test_cuda.py runs this file where Triton interprets or a GPU is at hand.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multibn.kernels import NormArgs, Running
from multibn.kernels.spec import NOT_FINITE, OK, ONE_VALUE, unpack
from tests.helpers.spread import spread
from tests.kernels.passes import INTERPRETED, LIBRARIES, as_numpy, exact, libraries, only
from tests.kernels.passes import kernels as kernels

host_memory = pytest.mark.skipif(INTERPRETED is not None, reason="nobody looks on a GPU")


def finish(
    kernels: Any, summed: Any, *share: Any, of: Any = LIBRARIES[-1], **options: Any
) -> tuple[Any, int]:
    """The statistics in a message, and its state."""
    i = NormArgs(of(np.zeros((1, (len(summed) - 2) // 2), "f4")), None, None, 1.0, (0,), **options)
    _, batch, state = kernels.finish_forward(i, summed, *share)
    return unpack(batch), state


@pytest.mark.parametrize("C", [1, 6, 75, 700])
@pytest.mark.parametrize("count", [0.0, 1.0, 3.0, 2.0**24 + 1, 2.0**40 + 1])
@libraries
def test_statistics_are_those_of_the_message(kernels: Any, C: int, count: float, of: Any) -> None:
    """Wherever the message begins; and NumPy's may be summed in place again."""
    first, second = np.random.default_rng(0).normal(size=(2, C))
    second = first**2 + second**2
    weight = min(count, 2.0**40 - 1)
    memory = of(np.r_[7.0, 3 * weight * first, 3 * weight * second, 3 * weight, 3 * count])
    with only(kernels):
        found, state = finish(kernels, memory[1:], weight, count, of=of)
    assert state == OK
    if of is as_numpy:
        memory[...] = np.nan
    right = [first, second - first * first] if count else [0 * first] * 2
    element_weight = weight / (max(count, 1) * max(3 * weight, 1))
    for v, expected in zip(found, [*right, 3 * count, element_weight], strict=True):
        assert v.shape == np.shape(expected)
        assert v.dtype == of(np.ones(1)).dtype
        np.testing.assert_allclose(exact(v), expected, rtol=1e-14, atol=1e-15 * second.max())


def test_a_rank_without_data_has_no_weight(kernels: Any) -> None:
    """Another rank's data are there, and a variance that rounding has made negative."""
    summed = LIBRARIES[-1](np.array([4.0, 8.0, 10.0, 16.0 - 1e-9, 4.0, 8.0]))
    found, _ = finish(kernels, summed, 0.0, 0.0)
    assert [exact(v).tolist() for v in found] == [[1, 2], [1.5, 0], 8, 0]
    found, _ = finish(kernels, summed, 2.0, 0.0)  # by a rank's weight of its own
    assert float(found.element_weight) == 0.5


@libraries
@pytest.mark.parametrize("kind", ["strided", "float32", "weight float32", "weight float64"])
def test_other_strides_and_dtypes_are_read(kernels: Any, kind: str, of: Any) -> None:
    """So is a number that is an array."""
    numbers = np.array([2.0, 4.0, 6.0, 12.0, 2.0, 4.0])
    summed = of(np.repeat(numbers, 2))[::2] if kind == "strided" else of(numbers)
    summed = of(numbers.astype("f4")) if kind == "float32" else summed
    weight: Any = of(np.asarray(3.0, kind[-7:])) if "weight" in kind else 3.0
    found, _ = finish(kernels, summed, weight, 2.0, of=of)
    assert [exact(v).tolist() for v in found] == [[1, 2], [2, 2], 4, 0.75]


@host_memory
@libraries
def test_a_message_tells_what_is_not_finite(kernels: Any, of: Any) -> None:
    good = np.array([4.0, 8.0, 10.0, 20.0, 2.0, 2.0])
    assert finish(kernels, of(good), 1.0, 1.0, of=of)[1] == OK
    for bad in (np.nan, np.inf, -np.inf):
        summed = good.copy()
        summed[3] = bad
        found, state = finish(kernels, of(summed), 1.0, 1.0, of=of)
        assert state == NOT_FINITE
        assert (float(found.mean[0]), float(found.mean[1]), float(found.var[0])) == (2.0, 4.0, 1.0)
        assert np.isnan(float(found.var[1])) >= np.isnan(bad)
    alone = np.array([4.0, 8.0, 16.0, 64.0, 1.0, 1.0])
    for count in (1.0, 0.0):  # also on an empty rank
        assert finish(kernels, of(alone), count, count, of=of)[1] == ONE_VALUE


MEAN, VAR = np.random.default_rng(0).uniform(0.5, 2.0, (2, 7))


def moved(
    kernels: Any,
    old: Any,
    *,
    total: float = 6.0,
    count: float = 2.0,
    spoil: float = 0.0,
    **options: Any,
) -> Running:
    """Running statistics that a batch has moved, by a message of weight 1."""
    running = Running(*old, **options)
    summed = np.r_[MEAN, VAR + MEAN * MEAN + spoil, 1.0, total]
    of = LIBRARIES[0] if isinstance(running.mean, np.ndarray) else LIBRARIES[-1]
    finish(kernels, of(summed), 1.0, count, of=of, running=running)
    return running


@pytest.mark.parametrize(
    "case",
    spread(
        [0.3, 1.0, -0.5, None],
        [None, 0, 3],
        ["unbiased_global", "unbiased_local", "biased"],
        [0.0, 1.5, 6.0],
        [2.0, 0.0],
        over=[["float32", "float64", "float16"], LIBRARIES],
    ),
)
def test_running_statistics_move_by_the_formula(kernels: Any, case: Any) -> None:
    """A batch without elements changes nothing; a rank without has the factor of all ranks."""
    momentum, n, convention, total, count, dtype, of = case
    olds = np.random.default_rng(1).uniform(0.5, 2.0, (2, 7)).astype(dtype)
    counter = None if n is None else of(np.array(n))
    options: Any = {"momentum": momentum, "convention": convention, "num_batches": counter}
    assert Running._fields == ("mean", "var", *options), "each field needs values of its own here"
    with only(kernels):
        found = moved(kernels, [of(v.copy()) for v in olds], total=total, count=count, **options)
    is_moved = int(total > 0)
    share = momentum if momentum is not None or n is None else 1 / (n + 1)
    share = (share or 0.0) * is_moved
    elements = 2.0 if convention == "unbiased_local" and count else total
    factor = 1.0 if convention == "biased" else elements / max(elements - 1, 1)
    expected = MEAN, VAR * factor
    rtol = {"float16": 1e-3, "float32": 2e-7, "float64": 1e-14}[dtype]
    for value, old, new in zip(found[:2], olds, expected, strict=True):
        assert value.dtype == of(old).dtype
        right = old.astype("f8") + share * (new - old)
        np.testing.assert_allclose(exact(value), right, rtol=rtol)
        if not total:
            np.testing.assert_array_equal(exact(value), old)
    if counter is not None:
        assert int(counter) == n + is_moved
    if hasattr(value, "_version"):  # by which autograd sees that a saved tensor has changed
        assert all(v is None or v._version > 0 for v in (*found[:2], counter)) or not total


@host_memory
@pytest.mark.parametrize("kind", ["strided", "big endian", "long double", "reshaped"])
def test_running_statistics_of_any_memory_are_moved(kernels: Any, kind: str) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        "strided": lambda v: np.repeat(v, 2)[::2],
        "reshaped": lambda v: v.reshape(7, 1).copy(),
        "long double": lambda v: v.astype(np.longdouble),
        "big endian": lambda v: v.astype(">f8"),
    }
    counter = np.array(3)
    ones = [changes[kind](np.ones(7)) for _ in "ab"]
    got = moved(kernels, ones, momentum=0.3, convention="biased", num_batches=counter)
    for value, new in zip(got[:2], (MEAN, VAR), strict=True):
        np.testing.assert_allclose(np.ravel(value).astype("f8"), 0.7 + 0.3 * new, rtol=1e-14)
    assert counter == 4


@host_memory
def test_running_statistics_that_cannot_be_moved_are_an_error(kernels: Any) -> None:
    frozen = np.ones(7)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        moved(kernels, [frozen, frozen], momentum=0.3)
    with pytest.raises(ValueError, match="`convention` must be one of 'unbiased_global', "):
        moved(kernels, [np.ones(7), np.ones(7)], momentum=0.3, convention="global")


@libraries
@pytest.mark.parametrize("total, spoil", [(np.nan, 0.0), (4.0, np.inf)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_nothing_moves_where_the_message_is_wrong(
    kernels: Any, of: Any, total: float, spoil: float
) -> None:
    old, counter = [of(np.ones(7)), of(np.ones(7))], of(np.array(1))
    moved(kernels, old, total=total, spoil=spoil, momentum=0.5, num_batches=counter)
    assert exact(old[0]).tolist() == exact(old[1]).tolist() == [1.0] * 7
    assert counter == 1
