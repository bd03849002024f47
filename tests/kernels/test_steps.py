"""Messages, statistics and running statistics: the C core gives the numbers of the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn import kernels  # noqa: E402
from multibn.kernels import NOT_FINITE, ONE_VALUE, REFUSED, RIGHT, Running  # noqa: E402
from tests.helpers.spread import spread  # noqa: E402
from tests.kernels.passes import Verbs, as_numpy, as_torch, libraries  # noqa: E402
from tests.kernels.passes import compiled_only as compiled_only  # noqa: E402
from tests.kernels.test_host import EPS, generic, host, reference  # noqa: E402

both = pytest.mark.parametrize("passes", [generic, host], ids=["generic", "host"])


def moved(
    passes: Any, of: Callable[[Any], Any], dtype: Any = "float64", n: int | None = 3, **options: Any
) -> Running:
    """Running statistics that were moved by a batch."""
    rng = np.random.default_rng(0)
    old_mean, old_var, mean, var = rng.uniform(0.5, 2.0, (4, 7))
    arrays = (of(v.astype(dtype)) for v in (old_mean, old_var))
    counter = None if n is None else of(np.array(n))
    values: Any = {"momentum": 0.3, "num_batches": counter, **options}
    running = Running(*arrays, **values)
    passes.move(running, mean, var, 6.0, 2.0)
    return running


@pytest.mark.parametrize(
    "momentum, n, convention, dtype, of",
    spread(
        [0.3, 1.0, None],
        [None, 0, 3],
        ["unbiased_global", "unbiased_local", "biased"],
        over=[["float32", "float64", "float16"], [as_numpy, as_torch]],
    ),
)
def test_the_core_moves_running_statistics_as_the_reference(
    dtype: str,
    momentum: float | None,
    n: int | None,
    convention: str,
    of: Any,
    request: pytest.FixtureRequest,
) -> None:
    options: Any = {"momentum": momentum, "convention": convention}
    right = moved(generic, of, dtype, n, **options)
    request.getfixturevalue("compiled_only")
    got = moved(host, of, dtype, n, **options)
    rtol = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for value, expected in ((got.mean, right.mean), (got.var, right.var)):
        assert value.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(value), np.asarray(expected), rtol=rtol)
    if n is not None:
        assert int(got.num_batches) == int(right.num_batches) == n + 1  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("kind", ["strided", "big endian", "long double", "reshaped"])
def test_running_statistics_of_any_memory_are_moved(passes: Any, kind: str) -> None:
    right = moved(generic, as_numpy)

    def of(v: Any) -> Any:
        if v.ndim == 0:
            return v
        if kind == "strided":
            return np.repeat(v, 2)[::2]
        if kind == "reshaped":
            return v.reshape(7, 1)
        return v.astype({"long double": np.longdouble, "big endian": ">f8"}[kind])

    got = moved(passes, of)
    for value, expected in ((got.mean, right.mean), (got.var, right.var)):
        np.testing.assert_allclose(np.ravel(value).astype("f8"), expected, rtol=1e-14)
    assert got.num_batches == 4


@both
def test_running_statistics_that_cannot_be_moved_are_an_error(passes: Any) -> None:
    def of(v: Any) -> Any:
        v = v.copy()
        v.flags.writeable = False
        return v

    with pytest.raises(ValueError, match="read-only"):
        moved(passes, of)
    with pytest.raises(ValueError, match="must be one of"):
        moved(passes, as_numpy, convention="global")


@both
def test_autograd_sees_that_running_statistics_were_moved(passes: Any) -> None:
    require.need("torch")
    mean, var, *_, num_batches = moved(passes, as_torch)
    assert all(v is not None and v._version > 0 for v in (mean, var, num_batches))


@libraries
@both
def test_nothing_moves_where_all_ranks_are_empty_or_the_message_is_wrong(
    passes: Any, of: Any
) -> None:
    for count, bad in ((0.0, 1.0), (np.nan, 1.0), (4.0, np.inf)):
        running = Running(of(np.ones(2)), of(np.ones(2)), 0.5, num_batches=of(np.array(1)))
        summed = of(np.array([2.0, 4.0, 6.0, 12.0 * bad, 2.0, count]))
        x = of(np.ones((2, 2)))
        options: Any = {"eps": 1.0, "axis": (0,), "running": running}
        passes.finish_forward(summed, x, None, None, 1.0, 2.0, **options)
        np.testing.assert_array_equal(running.mean, 1.0)
        np.testing.assert_array_equal(running.var, 1.0)
        assert running.num_batches == 1


@libraries
@both
def test_statistics_are_arrays_like_the_input(passes: Any, of: Any) -> None:
    for summed in (np.array([2.0, 4.0, 6.0, 12.0, 2.0, 4.0]), np.array([0.0] * 6)):
        given = of(summed)
        found = passes.unpack(given, (2,), 1.0, 2.0)
        for v, shape in zip(found[:4], [(2,), (2,), (), ()], strict=True):
            assert type(v) is type(of(np.ones(1))) or np.shape(v) == ()
            assert v.shape == shape
            assert str(v.dtype).endswith("float64")
        weights = max(summed[-2], 1)
        np.testing.assert_allclose(found.mean, summed[:2] / weights)
        np.testing.assert_allclose(found.var, summed[2:4] / weights - (summed[:2] / weights) ** 2)
        assert (float(found.count), float(found.element_weight)) == (summed[-1], 0.5 / weights)
        assert found.state == RIGHT
        # The message may be summed in place again.
        if of is as_numpy:
            given[...] = np.nan
            assert np.isfinite(np.asarray(found.mean)).all()
            assert np.isfinite(np.asarray(found.var)).all()


@libraries
@both
@pytest.mark.parametrize("kind", ["strided", "float32"])
def test_messages_of_other_strides_and_dtypes_are_read(passes: Any, kind: str, of: Any) -> None:
    numbers = np.array([2.0, 4.0, 6.0, 12.0, 2.0, 4.0])
    strided = of(np.repeat(numbers, 2))[::2]
    found = passes.unpack(
        strided if kind == "strided" else of(numbers.astype("f4")), (2,), 1.0, 2.0
    )
    np.testing.assert_array_equal(found.mean, [1.0, 2.0])
    np.testing.assert_array_equal(found.var, [2.0, 2.0])
    assert (float(found.count), float(found.element_weight)) == (4.0, 0.25)


@libraries
@both
def test_a_message_tells_what_is_not_finite_or_refused(passes: Any, of: Any) -> None:
    good = np.array([4.0, 8.0, 10.0, 20.0, 2.0, 2.0])
    assert passes.unpack(of(good), (2,), 1.0, 1.0).state == RIGHT
    for bad in (np.nan, np.inf, -np.inf):
        summed = good.copy()
        summed[3] = bad
        found = passes.unpack(of(summed), (2,), 1.0, 1.0)
        assert found.state == NOT_FINITE
        assert (float(found.mean[0]), float(found.mean[1]), float(found.var[0])) == (2.0, 4.0, 1.0)
        assert np.isnan(bad) == np.isnan(float(found.var[1]))
    assert passes.unpack(of(np.full(6, np.nan)), (2,), 1.0, 1.0).state == REFUSED
    found = passes.unpack(of(np.zeros(6)), (2,), 0.0, 0.0)
    assert found.state == RIGHT
    assert not any((*found.mean, *found.var, found.count, found.element_weight))
    alone = np.array([4.0, 8.0, 16.0, 64.0, 1.0, 1.0])
    assert passes.unpack(of(alone), (2,), 1.0, 1.0).state == ONE_VALUE
    assert passes.unpack(of(alone), (2,), 0.0, 0.0).state == ONE_VALUE  # on an empty rank


@libraries
@both
def test_a_constant_has_no_variance_over_ranks(passes: Any, of: Any) -> None:
    mean = np.random.default_rng(0).normal(size=1000)
    x = of(np.broadcast_to(mean, (4, 1000)).copy())
    packed = passes.begin_forward(x, 4.0, 4.0, axis=(0,))
    found = passes.unpack(packed + packed, mean.shape, 4.0, 4.0)
    np.testing.assert_array_equal(found.var, 0.0)
    np.testing.assert_array_equal(found.mean, mean)


@pytest.mark.parametrize("layout", ["NCHW", "channels last"])
@pytest.mark.parametrize("shape", [(3, 5, 13, 11), (2, 70, 7, 7), (37, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_relu_is_right_both_ways(
    shape: tuple[int, ...], layout: str, dtype: str, residual: bool, request: pytest.FixtureRequest
) -> None:
    """The sign comes from `x` or, with a residual, from the output; dy is in another order."""
    require.need("torch")
    import torch

    generator = torch.Generator().manual_seed(0)
    x, other, dy = (
        torch.randn(*shape, generator=generator).to(getattr(torch, dtype)) for _ in "abc"
    )
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    weight, bias = torch.rand(shape[1]) - 0.5, torch.rand(shape[1]) - 0.5
    options: Any = {"eps": 1e-3, "axis": (0, 2, 3), "relu": True}

    def run(k: Any) -> list[Any]:
        k = Verbs(k)
        summed = k.begin_forward(x, 2.0, 2.0, axis=(0, 2, 3))
        y, mean, var, _, element_weight, _ = k.finish_forward(
            summed, x, weight, bias, 2.0, 2.0, residual=other if residual else None, **options
        )
        statistics = mean, var, weight, bias
        saved = y if residual else None
        sums, dweight, dbias, *_ = k.begin_backward(dy, x, *statistics, y=saved, **options)
        dx, dresidual = k.finish_backward(
            sums, dy, x, *statistics, element_weight, y=saved, **options
        )
        assert (dresidual is not None) == residual
        if residual:
            torch.testing.assert_close(dresidual, torch.where(y > 0, dy, 0.0), rtol=0, atol=0)
        assert y.stride() == dx.stride() == x.stride()
        return [y, sums, dweight, dbias, dx]

    if dtype == "bfloat16":  # the reference rounds before it adds the residual
        exact = [t.double() for t in (x, other, dy)]
        x16, x, other, dy = x, *exact
        right = run(reference)
        x, other, dy = x16, *(t.to(torch.bfloat16) for t in (other, dy))
    else:
        right = run(reference)
    request.getfixturevalue("compiled_only")
    for got, expected in zip(run(kernels.select(x)), right, strict=True):
        tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}[dtype]
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("weight", [None, [3.0, -1.0]])
def test_tensors_that_need_a_gradient_are_differentiated(weight: list[float] | None) -> None:
    """Each of the arrays that go into a verb, also where the activation needs none."""
    require.need("torch")
    import torch

    def tensor(v: Any) -> Any:
        return torch.tensor(v, dtype=torch.float64)

    def check(function: Any, *arrays: Any) -> None:
        constants = [tensor(v) for v in arrays]
        for i, v in enumerate(constants):  # one of them alone
            torch.autograd.gradcheck(
                lambda leaf, i=i: function(*constants[:i], leaf, *constants[i + 1 :]),
                v.clone().requires_grad_(),
            )

    def verb(name: str, *arguments: Any) -> Any:
        options: Any = {"axis": (0,)} | ({} if name == "begin_forward" else {"eps": 0.25})
        found = getattr(Verbs(kernels.generic), name)(*arguments, **options)
        return found if isinstance(found, torch.Tensor) else found[0]

    x, w = tensor([[2.0, 1.0], [0.5, 4.0]]), None if weight is None else tensor(weight)
    mean, var, a, b = [1.0, 2.0], [1.0, 4.0], [0.5, -2.0], [3.0, 1.0]
    check(lambda m, v: verb("normalize", x, m, v, w, None), mean, var)
    check(lambda p, q: verb("normalize", x, tensor(mean), tensor(var), p, q), a, b)
    check(lambda v: verb("begin_forward", v, 2.0, 3.0), x.tolist())
    summed = [2.0, 4.0, 6.0, 12.0, 2.0, 4.0]
    check(lambda s, v: verb("finish_forward", s, v, w, None, 1.0, 2.0), summed, x.tolist())
    check(lambda g, m, v: verb("begin_backward", g, x, m, v, w, None), x.tolist(), mean, var)
    check(
        lambda s, g, m, v, e: verb("finish_backward", s, g, x, m, v, w, None, e),
        [0.5, -2.0, 3.0, 1.0], x.tolist(), mean, var, 0.25,
    )  # fmt: skip


def test_lazy_zeros_and_another_default_device_are_taken() -> None:
    """The default device may be another one, and lazy zeros have no address."""
    require.need("torch")
    import torch

    on: Any = {"eps": EPS, "axis": (0,)}
    x = torch.arange(38.0).reshape(2, 19)  # of a size that no other test has
    k = Verbs(kernels.select(x))
    with torch.device("meta"):
        payload = k.begin_forward(x, 2.0, 2.0, axis=(0,))
        y, mean, var, *_, state = k.finish_forward(payload, x, None, None, 2.0, 2.0, **on)
    assert state == RIGHT
    assert y.is_cpu
    np.testing.assert_allclose(mean, x.mean(0))
    payload, *_ = k.begin_backward(
        torch._efficientzerotensor((2, 19)),
        *(x, mean, var, None, None),
        **on,
    )
    assert not payload.any()
