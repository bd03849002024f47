"""What only the Triton kernels have, on a GPU or interpreted: see test_cuda.py."""

import contextlib
import gc
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from multibn import kernels
from multibn.engine import plan
from multibn.kernels import Gradient, NormArgs, Running, cuda, reference, steps
from multibn.kernels.spec import pack_statistics, unpack
from multibn.kernels.triton import tiling
from multibn.wire import Message, head
from tests.kernels.passes import (
    AXIS,
    DEVICE,
    as_torch,
    check,
    data,
    exact,
    last,
    layer,
    others,
    passes,
    statistics,
)
from tests.kernels.test_moments import moments
from tests.kernels.test_passes import mask_of

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has none of this")
GENERATOR = torch.Generator()
orders = pytest.mark.parametrize("order", [np.asarray, last], ids=["NCHW", "channels_last"])


@pytest.fixture(autouse=True)
def _afresh() -> None:
    GENERATOR.manual_seed(0)
    tiling.tilings_of.cache_clear()  # of what other tests changed the constants to


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take tensors in host memory, which the interpreter needs, for tensors on a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "select", lambda x, *others: cuda)
        monkeypatch.setattr(steps, "is_on_host", lambda a: False)
        monkeypatch.setattr(plan, "_memory_kind", lambda x: "torch's GPU")


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has one: how work is divided depends on their number."""
    monkeypatch.setattr(tiling, "_multiprocessors", lambda device: 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, to be told from what was left to `reference`."""
    launches: list[str] = []
    launch = cuda.launch

    def recorded(kernel: Any, programs: int, arguments: Any, constants: Any, *others: Any) -> None:
        launches.append(kernel.__name__)
        # In the interpreter every operation is rounded.
        assert constants["enable_fp_fusion"] is ("DTYPE" in constants)
        with _disable_current_modes():  # the interpreter's operations are no launches
            launch(kernel, programs, arguments, constants, *others)

    monkeypatch.setattr(cuda, "launch", recorded)
    return launches


@pytest.mark.parametrize("weight_is_tensor", [False, True])
@pytest.mark.parametrize("count_is_tensor", [False, True])
def test_a_key_of_a_launch_says_which_numbers_are_tensors(
    weight_is_tensor: bool, count_is_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that was compiled for tensors would read a number as an address."""
    keys: list[Any] = []
    monkeypatch.setattr(cuda, "launch", lambda *launch: keys.append(launch[-2]))
    numbers = (
        number(4.0) if is_tensor else 4.0 for is_tensor in (weight_is_tensor, count_is_tensor)
    )
    cuda.begin_forward(NormArgs(wide(4, 3), None, None, 1.0, (0,)), *numbers)
    kinds = (torch.float64 if of else False for of in (weight_is_tensor, count_is_tensor))
    assert keys[-1][:3] == ("merge_moments", *kinds)


def tilings_of(x: Any) -> Any:
    return tiling.tilings_of(x.shape, x.stride(), x.dtype, AXIS, x.device)


def wide(*shape: int) -> Any:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(DEVICE)


def number(v: float) -> Any:
    return torch.full((), v, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_planes_that_begin_inside_of_vectors_are_read_by_vectors(dtype: str) -> None:
    x = as_torch(data((3, 8, 5, 13)), dtype)
    assert tilings_of(x).sums.constants["VECTOR"] == 16 // x.element_size()


@orders
@pytest.mark.parametrize("mask", [None, "ends"])
@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
def test_several_splits_of_several_tiles(
    order: Any, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What large activations are divided into, on a small one."""
    monkeypatch.setattr(tiling, "_SUMS", 12)
    monkeypatch.setattr(tiling, "_ELEMENTWISE", 8)
    monkeypatch.setattr(tiling, "_TILE", 64)
    monkeypatch.setitem(cuda._FEW_SPLITS, "SPLITS", 2)
    monkeypatch.setitem(cuda._FEW_SPLITS, "BLOCK", 2)
    i, dy = layer((7, 4, 9, 11), order=order, mask=mask_of(mask, (7, 4, 9, 11)))
    tilings = tilings_of(i.x)
    assert tilings.sums.sizes[7] > 1  # tiles of a program
    assert tilings.elementwise[0].sizes[7] > 1
    assert tilings.sums.splits > 2
    check(cuda, i, dy)


@pytest.mark.usefixtures("one_multiprocessor")
def test_a_first_tile_may_be_unlike_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean, which centres the others, is then a poor one."""
    monkeypatch.setattr(tiling, "_SUMS", 1)
    x = data((64, 2, 16, 16)) + np.float32(1000)
    x[:8] = 0
    there = as_torch(x)
    assert (tilings_of(there).sums.sizes[7], tilings_of(there).sums.splits) == (8, 1)
    _, var = moments(cuda, there)
    np.testing.assert_allclose(var, x.astype("float64").var(AXIS), rtol=1e-6)


@orders
def test_padding_counts_for_nothing(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits whose first tiles are padding, a large mean, counts as they are on a GPU."""
    monkeypatch.setattr(tiling, "_SUMS", 2)
    monkeypatch.setattr(tiling, "_TILE", 64)
    mask = np.zeros((6, 1, 5, 17), bool)
    mask[1::2, :, 1:, 9:15] = True
    x = data((6, 4, 5, 17)) + np.float32(1e4)
    whole = x.astype("float64")[1::2, :, 1:, 9:15]
    x = as_torch(order(np.where(mask, x, np.float32(math.nan))))
    running = Running(wide(4), wide(4) ** 2, 0.3, "unbiased_local")
    old = running.var.clone()
    i = NormArgs(x, None, None, 0.1, AXIS, running=running, mask=as_torch(mask))
    count = number(72.0)
    y, packed, _ = cuda.finish_forward(i, cuda.begin_forward(i, count, count), count, count)
    batch = unpack(packed)
    np.testing.assert_allclose(exact(batch.mean), whole.mean(AXIS), rtol=0, atol=1e-6)
    np.testing.assert_allclose(exact(batch.var), whole.var(AXIS), rtol=1e-6)
    assert (batch.count.item(), batch.element_weight.item()) == (72, 1 / 72)
    torch.testing.assert_close(running.var, 0.7 * old + 0.3 * batch.var * (72 / 71))
    assert bool((y[~i.mask.expand_as(y)] == 0).all())  # type: ignore[union-attr]
    i = i._replace(mask=i.mask & False)  # type: ignore[operator]
    assert cuda.begin_forward(i, 0 * count, 0 * count).tolist() == [0] * 10


@pytest.mark.parametrize("room", [0, 3, 2000])
@pytest.mark.parametrize("file", [cuda, reference], ids=["cuda", "reference"])
def test_a_message_may_have_memory_of_its_own(room: int, file: Any, launched: list[str]) -> None:
    """The head, the payload, and zeros."""
    i, dy = layer((2, 5, 3, 3))
    batch = pack_statistics(statistics(i))

    def written(phase: str, out: Message | None = None) -> Any:
        if phase == "forward":
            return file.begin_forward(i, 2.0, 3.0, out=out)
        return file.begin_backward(Gradient(dy, i, batch), out=out)[0]

    for phase, n in (("forward", 12), ("backward", 10)):
        payload = written(phase).tolist()
        assert len(payload) == n
        right = head(7.0) + payload + room * [0]
        numbers = torch.full((len(right),), math.nan, dtype=torch.float64).to(DEVICE)
        message = Message(numbers, 7.0)
        assert written(phase, message) is message
        assert numbers.tolist() == right
    assert (launched == []) is (file is reference)


def test_tensors_elsewhere_do_not_fit() -> None:
    v = wide(5)
    elsewhere = v.to("meta")
    assert cuda.fit(v.device, (5,), (v, v), (v, None))
    assert not cuda.fit(v.device, (5,), (elsewhere, elsewhere))
    assert not cuda.fit(v.device, (5,), (v, v), (v, elsewhere))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in of CuPy whose current stream is 13; `used` has the streams of all exchanges."""
    streams, used = ["torch's"], []

    class ndarray(np.ndarray):
        def __dlpack_device__(self) -> Any:
            return 2, 0  # kDLCUDA

        def __dlpack__(self, *, stream: Any, **_: Any) -> Any:  # type: ignore[override]
            used.append(stream)
            return super().__dlpack__()

    @contextlib.contextmanager
    def in_stream(ptr: Any) -> Iterator[None]:
        streams.append(ptr)
        yield
        streams.pop()

    def from_dlpack(x: Any) -> Any:
        used.append(streams[-1])
        return x.numpy().view(ndarray)

    module: Any = ModuleType("cupy")
    module.ndarray, module.from_dlpack, module.used = ndarray, from_dlpack, used
    module.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=13))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr: ptr)
    monkeypatch.setattr(torch.cuda, "stream", in_stream)
    of_torch: Any = lambda device: SimpleNamespace(cuda_stream=streams[-1])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", of_torch)
    kernels._native.cache_clear()
    yield module
    kernels._native.cache_clear()
    sys.modules.pop("multibn.kernels.cupy", None)
    assert streams == ["torch's"]


@pytest.mark.skipif(DEVICE != "cpu", reason="the stand-in is for machines without CuPy")
@orders
def test_cupy_arrays_take_the_same_kernels(order: Any, cupy: Any, launched: list[str]) -> None:
    """The kernels run in CuPy's stream, with its strides; its arrays live from half to half."""

    def given(x: Any) -> Any:
        return x.numpy().copy(order="K").view(cupy.ndarray)

    x, dy = (as_torch(order(data((3, 5, 4, 6), seed=seed))) for seed in (0, 1))
    weight, mean = wide(5).float(), wide(5).float()
    i, mine = (
        NormArgs(of(x), of(weight), None, 1e-5, AXIS, running=Running(of(mean), of(mean**2), 0.1))
        for of in (given, torch.clone)
    )
    gradient = given(dy)
    file, alive = kernels.select(i.x), ref(gradient)
    assert file.__name__ == "multibn.kernels.cupy"
    y, batch, state = file.finish_forward(i, file.begin_forward(i, 72.0, 72.0), 72.0, 72.0)
    g = Gradient(gradient, i, batch)
    summed, dweight, _, begun = file.begin_backward(g)
    del gradient
    g = g._replace(dy=None)  # `begun` has it
    assert alive() is not None
    dx, _ = file.finish_backward(g, summed, begun)
    del begun
    gc.collect()  # the interpreter has circles
    assert alive() is None
    right, about, _ = reference.finish_forward(
        mine, reference.begin_forward(mine, 72.0, 72.0), 72.0, 72.0
    )
    g = Gradient(dy, mine, about)
    sums, right_dweight, _, *_ = reference.begin_backward(g)
    right_dx, _ = reference.finish_backward(g, sums)
    got = y, *unpack(batch), dweight, dx, *i.running[:2]
    expected = right, *unpack(about), right_dweight, right_dx, *mine.running[:2]
    for a, b in zip(got, expected, strict=True):
        assert type(a) is (cupy.ndarray if b.ndim else np.float64)  # an element, as NumPy has it
        assert [n // a.itemsize for n in a.strides] == list(b.stride())
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)
    assert state == reference.OK
    assert launched == [
        "moments", "merge_moments", "finish_forward", "normalize",
        "backward_sums", "merge_sums", "input_gradient",
    ]  # fmt: skip
    assert set(cupy.used) == {13}


@on_gpu
def test_a_graph_captures_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    i, dy = layer((8, 16, 14, 14), relu=True, residual=True)
    received = [as_torch(v) for v in others(16)]  # no copy from the host in the graph
    monkeypatch.setattr("tests.kernels.passes.others", lambda C: received)
    batch = statistics(i)

    def results() -> list[Any]:
        return [v for v in passes(cuda, i, dy, batch).values() if v is not None]

    results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results()
    i.x.copy_(2 * dy)
    graph.replay()
    for a, b in zip(got, results(), strict=True):
        assert torch.equal(a, b)


@on_gpu
def test_an_input_may_have_more_than_2_to_the_31_elements() -> None:
    x = torch.ones((1 << 15, 3, 1 << 15, 1), dtype=torch.float16, device="cuda")
    x[-1, -1, -1] = 3
    mean, _ = moments(cuda, x)
    np.testing.assert_allclose(mean, [1, 1, 1 + 2 / 2**30], rtol=0, atol=1e-12)
    i = NormArgs(x, None, None, 0.0, AXIS)
    batch = pack_statistics(statistics(i, mean=np.zeros(3), var=np.full(3, 0.25)))
    y = cuda.normalize(i, batch)
    assert y[-1, -1, -1].item() == 6
