"""All kernels: the numbers of each layout, dtype and mask, and what is refused.

test_cuda.py runs this file where Triton interprets or a GPU is at hand.
"""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from multibn.kernels import Gradient, NormArgs, reference, select
from multibn.kernels.spec import pack_statistics, unpack
from tests.helpers.spread import spread
from tests.kernels.passes import (
    AXIS,
    INTERPRETED,
    LIBRARIES,
    as_torch,
    check,
    data,
    definition,
    exact,
    last,
    layer,
    libraries,
    others_of,
    passes,
    statistics,
    strides,
)
from tests.kernels.passes import kernels as kernels

# Long planes and short ones, more columns than a tile has, several samples in a tile, few rows and
# many, one channel, one sample, one element; rows, sequences and volumes.
SHAPES = [
    (3, 5, 13, 11), (2, 70, 7, 7), (37, 3, 2, 2), (5, 1, 1, 300), (1, 4, 6, 1), (1, 1, 1, 1),
    (6, 3), (4, 3, 6), (2, 3, 2, 3, 2), (3, 8, 5, 13),
]  # fmt: skip
if INTERPRETED is None:  # planes of more than one block, short samples of few channels
    SHAPES += [(19, 2100, 1, 1), (3, 2, 40, 30), (2600, 3, 1, 1), (11, 13, 4, 5)]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
PARAMETERS: list[Any] = [
    ("float32", "float32"), ("float64", "float64"), ("float16", "float16"), ("float32", "float64"),
    ("float64", "float16"), ("float32", None), (None, "float32"), ("float16", None), (None, None),
]  # fmt: skip
MASKS = [None, "random", "ends", "nothing", "all"]
# Of NumPy, and of the interpreter.
invalid = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
VARIANTS = list(product([False, True], [False, True], MASKS))  # ReLU, residual, mask


def mask_of(kind: str | None, shape: tuple[int, ...]) -> Any:
    """A mask: at random; ends of samples, the last sample whole; none; all."""
    rng = np.random.default_rng(2)
    one = (shape[0], 1, *shape[2:])
    if kind == "random":
        return rng.random(one) < 0.6
    if kind == "ends":
        places = int(np.prod(one[1:]))
        lengths = rng.integers(0, places + 1, one[0])
        lengths[-1] = places
        return (np.arange(places) < lengths[:, None]).reshape(one)
    return None if kind is None else np.full(one, kind == "all")


@invalid
@pytest.mark.parametrize("order", [np.asarray, last], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_dtype_and_mask_gives_the_exact_numbers(
    kernels: Any, shape: tuple[int, ...], dtype: str, order: Any
) -> None:
    """So do ReLU and residual, and weights and biases of any dtype."""
    seed = SHAPES.index(shape) + 20 * DTYPES.index(dtype) + 100 * (order is last)
    rng = np.random.default_rng(seed)
    number = 1 if INTERPRETED else 5 if kernels is reference or math.prod(shape) > 5000 else 20
    for n, at in enumerate(rng.permutation(len(VARIANTS))[:number]):
        relu, residual, mask = VARIANTS[at]
        of = LIBRARIES[n % len(LIBRARIES)] if dtype != "bfloat16" else as_torch
        parameters = PARAMETERS[rng.integers(len(PARAMETERS))]
        options: Any = {"relu": relu, "residual": residual, "parameters": parameters}
        i, dy = layer(shape, dtype, of, order=order, mask=mask_of(mask, shape), **options)
        got = check(kernels, i, dy, hint=f"mask {mask} {options}")
        for name in ("y", "dx", "normalized") if shape != (1, 1, 1, 1) else ():
            assert strides(got[name]) == strides(i.x)


@pytest.mark.parametrize(
    "shape, axis, native",
    [
        ((6, 5), (0,), True),
        ((6, 5), (1,), True),
        ((4, 3, 5), (0,), True),
        ((4, 3, 5), (0, 1), True),
        ((4, 3, 5), (2,), True),
        ((4, 2, 3, 5, 6), (0, 3, 4), True),
        ((4, 3, 2, 5, 6), (0, 2, 3, 4), True),
        ((4, 3, 5), (1,), False),
        ((2, 4, 3, 5), (1, 3), False),
        ((4, 3, 5, 6), (0, 2), False),
    ],
    ids=str,
)
def test_any_axes_can_be_reduced(
    kernels: Any, shape: tuple[int, ...], axis: tuple[int, ...], native: bool
) -> None:
    check(kernels, *layer(shape, axis=axis), native=native)


# `passes` moves running statistics in each case; test_steps.py changes their fields.
@pytest.mark.parametrize("field", [name for name in NormArgs._fields if name != "running"])
def test_each_field_of_the_arguments_has_a_part_in_the_numbers(kernels: Any, field: str) -> None:
    i, dy = layer((4, 3, 5), parameters=(None, None))
    values = others_of(i)
    assert field in values, f"`others_of` of passes.py must have a value of `NormArgs.{field}`"
    changed = i._replace(**{field: values[field]})
    plain, found = (definition(v, dy, np.ones((4, 3, 5))) for v in (i, changed))
    differ = [name for name, v in found.items() if not np.array_equal(v, plain[name])]
    assert differ, (
        f"`definition` of passes.py must say what `NormArgs.{field}` does, and `others_of` have a "
        "value of it that changes numbers"
    )
    fields = getattr(kernels, "FIELDS", {NormArgs: NormArgs._fields})[NormArgs]
    assert field in fields, f"`FIELDS` of {kernels.__name__} must have `NormArgs.{field}`"
    check(kernels, changed, dy, hint=f"where `NormArgs.{field}` alone has another value")


def gaps(a: Any) -> Any:
    return a[:, 1:4]


@pytest.mark.parametrize(
    "view",
    [lambda a: a[::2], gaps, lambda a: a[..., ::2], lambda a: a.swapaxes(2, 3)],
    ids=["rows", "channels", "columns", "transposed"],
)
@invalid
@pytest.mark.parametrize("masked", [False, True])
@libraries
def test_views_of_any_strides_give_the_exact_numbers(
    kernels: Any, view: Any, masked: bool, of: Any
) -> None:
    """Each array alone is such a view, then all of them."""
    full = (4, 5, 6, 8)
    arrays = [data(full, seed=seed) for seed in range(3)]
    shape = view(arrays[0]).shape
    whole = mask_of("random", full) if masked else None
    mask = None if whole is None or view is gaps else view(whole)
    mask = mask_of("random", shape) if masked and view is gaps else mask
    i, _ = layer(shape, of=of, relu=True, residual=True, mask=mask)
    for places in ([0], [1], [2], [0, 1, 2]):
        x, dy, residual = (
            of(view(a)) if k in places else of(view(a).copy()) for k, a in enumerate(arrays)
        )
        there = None if mask is None else of(mask)
        native = INTERPRETED is None or 0 not in places
        check(kernels, i._replace(x=x, residual=residual, mask=there), dy, native=native)


@pytest.mark.parametrize("shape", [(6, 5, 4), (64, 8, 3)])
def test_a_true_byte_of_a_mask_may_be_any(kernels: Any, shape: tuple[int, ...]) -> None:
    one, mask = layer(shape, of=as_torch)[0], mask_of("random", shape)
    other = np.where(mask, np.uint8(254), np.uint8(0)).view(bool)
    payloads = [
        exact(kernels.begin_forward(one._replace(mask=as_torch(m)), 1.0, float(mask.sum())))
        for m in (mask, other)
    ]
    np.testing.assert_array_equal(*payloads)


def test_mirrored_read_only_and_foreign_arrays_have_the_same_numbers(kernels: Any) -> None:
    if INTERPRETED is not None:
        pytest.skip("torch has none of these")
    i, dy = layer((4, 3, 5, 6))
    x, right = i.x, passes(kernels, i, dy)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"0" + x.tobytes(), "u1")[1:].view(x.dtype).reshape(x.shape)
    derived = x.view(type("Special", (np.ndarray,), {}))  # as np.memmap
    mirrored = np.ascontiguousarray(x[::-1, ::-1, :, ::-1])[::-1, ::-1, :, ::-1]
    for other, gradient in product(
        [frozen, unaligned, derived, mirrored, x.astype(">f4")], [dy, dy.astype("float64")]
    ):
        found = passes(kernels, i._replace(x=other), gradient)
        assert found["y"].dtype == found["dx"].dtype == other.dtype
        for name, v in found.items():
            assert v is right[name] is None or np.allclose(v, right[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["strided", "float32"])
@pytest.mark.parametrize("place", ["weight", "bias", "sums"])
@libraries
def test_per_channel_arrays_of_any_memory_and_dtype_are_read(
    kernels: Any, kind: str, place: str, of: Any
) -> None:
    i, dy = layer((4, 5, 3, 6), of=of, relu=True, parameters=("float64", "float64"))
    arrays = {**i._asdict(), "sums": of(np.linspace(-1, 1, 10))}
    v = exact(arrays[place])
    arrays[place] = of(np.repeat(v, 2))[::2] if kind == "strided" else of(v, kind)
    sums = arrays.pop("sums")
    check(kernels, NormArgs(**arrays), dy, statistics(i), sums, native=False)


def test_per_channel_arrays_that_do_not_fit_are_refused(kernels: Any) -> None:
    i, dy = layer((4, 3, 2, 2))
    batch = statistics(i)
    packed = pack_statistics(batch)
    if INTERPRETED is not None:
        return
    short = i._replace(weight=i.weight[:2], bias=i.bias[:2])
    narrow = batch._replace(mean=batch.mean[:2], var=batch.var[:2])
    with pytest.raises(ValueError, match="reshape"):
        kernels.normalize(short, pack_statistics(narrow))
    with pytest.raises(ValueError, match="broadcast"):
        kernels.normalize(i._replace(weight=i.weight[:2]), packed)
    with pytest.raises(ValueError, match="reshape"):
        kernels.finish_backward(Gradient(dy, i, packed), np.ones(5))


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 2), (2, 0, 3, 2)], ids=str)
@libraries
def test_an_empty_input_is_taken(kernels: Any, shape: tuple[int, ...], of: Any) -> None:
    i, dy = layer(shape, of=of)
    check(kernels, i, dy, native=False)
    message = exact(kernels.begin_forward(i, 0.0, 0.0))
    np.testing.assert_array_equal(message, [0.0] * (2 * shape[1] + 2))


PLACES = ["x", "dy", "mean", "var", "weight", "bias", "sums"]
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize(
    "case",
    spread(SHAPES[:1], [np.asarray, last], PLACES, over=[BAD, LIBRARIES])
    if INTERPRETED
    else spread(SHAPES[:3], [np.asarray, last], PLACES, BAD, over=[LIBRARIES]),
)
@invalid
def test_what_is_not_finite_stays_in_its_channel(kernels: Any, case: Any) -> None:
    """And reaches exactly what the definition says."""
    shape, order, place, bad, of = case
    i, dy = layer(shape, of=of, order=order, relu=place in ("x", "bias"))
    batch, sums = statistics(i), of(np.linspace(-1, 1, 2 * shape[1]))
    arrays = {**i._asdict(), **batch._asdict(), "dy": dy, "sums": sums}
    where = (-1, 1, *[-1] * (len(shape) - 2)) if place in ("x", "dy") else 1
    arrays[place][where] = bad
    check(kernels, i, dy, batch, sums)


@pytest.mark.parametrize("eps, var", [*product([0.0, 1e-5, 10.0], [1e-12, 1e-6, 1.0, 1e12, 0.0])])
def test_eps_is_added_to_the_variance(kernels: Any, eps: float, var: float) -> None:
    if eps + var:
        i, dy = layer((4, 1, 6, 7), "float64")
        check(kernels, i._replace(eps=eps), dy, statistics(i, var=np.array([var])))


@pytest.mark.parametrize("order", [np.asarray, last], ids=["NCHW", "channels_last"])
def test_the_sign_of_an_output_is_that_of_the_forward_pass(kernels: Any, order: Any) -> None:
    """Where outputs round to 0 or are a rounding error from it."""
    x = data((3, 5, 7, 9))
    x[0] = x.mean(AXIS).reshape(1, 5, 1, 1)
    i, dy = layer(x.shape, relu=True, parameters=("float32", "float32"))
    bias = np.array([0, 0, 1e-30, 0, 0], "float32")
    i = i._replace(x=LIBRARIES[0](order(x)), bias=LIBRARIES[0](bias))
    mean, var = x.mean(AXIS, dtype="float64"), x.var(AXIS, dtype="float64")
    check(kernels, i, dy, statistics(i, mean=mean, var=var))


@pytest.mark.parametrize("dtype, smallest", [("float16", 2.0**-24), ("bfloat16", 2.0**-133)])
def test_the_sign_of_an_output_is_that_of_its_rounded_number(
    kernels: Any, dtype: str, smallest: float
) -> None:
    i, _ = layer((1, 4, 3, 8), dtype, as_torch, relu=True, parameters=(None, "float32"))
    tie = 0.4 if kernels.__name__.endswith("cpu") else 0.5  # the C core takes a tie for positive
    bias = as_torch(np.array([0.4, tie, 0.6, 1.0]) * smallest, "float32")
    i = i._replace(x=0 * i.x + 1, bias=bias)
    g = Gradient(i.x, i, pack_statistics(statistics(i, mean=np.ones(4))))
    _, _, _, *begun = kernels.begin_backward(g)
    dx, _ = kernels.finish_backward(g, as_torch(np.zeros(8)), *begun)
    assert (exact(dx) != 0).all(AXIS).tolist() == [False, False, True, True]


@pytest.mark.skipif(INTERPRETED is not None, reason="the other processes run these")
class TestTensors:
    """Tensors on the host that are not like arrays."""

    def test_views_of_a_tensor_give_the_numbers_of_arrays(self, kernels: Any) -> None:
        i, dy = layer((4, 5, 6, 7), of=as_torch)
        import torch

        same = [
            lambda a: a.to(memory_format=torch.channels_last),
            lambda a: torch.nn.Parameter(a, requires_grad=False),
            lambda a: torch._neg_view(-a),
            lambda a: torch.ones(()).expand(a.shape),  # what `y.sum().backward()` hands on
        ]
        for one, other in product(same, same[:-1]):
            check(kernels, i._replace(x=other(i.x)), one(dy))

    def test_tensors_that_need_a_gradient_are_differentiated(self) -> None:
        i, _ = layer((4, 5, 6, 7), of=as_torch)
        import torch

        def loss(x: Any) -> Any:
            file, there = select(x), i._replace(x=x)
            message = file.begin_forward(there, 2.0, 3.0)
            y, *_ = file.finish_forward(there, message, 2.0, 3.0)
            return message.square().sum() + y.square().sum() + y[0].sum()

        leaf = i.x.clone().requires_grad_()
        loss(leaf).backward()
        assert leaf.grad.any()
        torch.testing.assert_close(torch.func.grad(loss)(i.x), leaf.grad)

    def test_lazy_zeros_and_another_default_device_are_taken(self) -> None:
        """The default device may be another one, and lazy zeros have no address."""
        i, _ = layer((2, 19), of=as_torch)  # of a size that no other test has
        import torch

        file = select(i.x)
        with torch.device("meta"):
            message = file.begin_forward(i, 2.0, 2.0)
            y, batch, state = file.finish_forward(i, message, 2.0, 2.0)
        assert state == reference.OK
        assert y.is_cpu
        np.testing.assert_allclose(unpack(batch).mean, i.x.mean(0), rtol=1e-6)
        payload, *_ = file.begin_backward(Gradient(torch._efficientzerotensor((2, 19)), i, batch))
        assert not payload.any()


def test_a_device_without_float64_uses_the_host() -> None:
    strict = pytest.importorskip("array_api_strict")
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("array-api-strict moves arrays between devices with NumPy 2 only")
    device = strict.Device("no_float64")

    def there(v: Any) -> Any:
        return strict.asarray(v, device=device)

    i, dy = layer((8, 3, 4, 4), parameters=("float32", "float32"))
    message = reference.begin_forward(i._replace(x=there(i.x)), 128.0, 128.0)
    found = []
    for of in (there, np.asarray):
        own = i._replace(x=of(i.x), weight=of(i.weight), bias=of(i.bias))
        summed = message if of is there else np.asarray(message)
        y, batch, _ = reference.finish_forward(own, summed, 128.0, 128.0)
        sums, *parameters = reference.begin_backward(Gradient(of(dy), own, batch))
        dx, _ = reference.finish_backward(Gradient(of(dy), own, batch), sums)
        assert {str(v.dtype).rpartition(".")[2] for v in (batch.numbers, sums)} == {"float64"}
        found.append([y, dx, *parameters])
    assert message.device != device
    for got, value in zip(*found, strict=True):
        assert (got.dtype, got.device) == (strict.float32, device)
        got = np.asarray(got.to_device(message.device))
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4)
