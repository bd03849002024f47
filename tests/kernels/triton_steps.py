"""The Triton kernels of the steps against `reference`, see test_cuda.py."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multibn import kernels
from multibn.communicators import nonfinite
from multibn.communicators.channel import flush_checks
from multibn.kernels import NormArgs, Running, cuda, reference, spec, steps
from multibn.torch_backend import SyncBatchNorm
from multibn.torch_backend.layer import compiled
from multibn.wire import LARGEST
from tests.helpers.ranks import EqualRanks
from tests.kernels.passes import DEVICE
from tests.kernels.triton_passes import _afresh as _afresh
from tests.kernels.triton_passes import as_on_a_gpu as as_on_a_gpu
from tests.kernels.triton_passes import launched as launched
from tests.kernels.triton_passes import wide


def unpack(summed: Any, C: int, **options: Any) -> Any:
    """Mean, variance, count and element weight."""
    i = NormArgs(torch.zeros(1, C, device=DEVICE), None, None, 1e-5, (0,), **options)
    return spec.unpack(cuda.finish_forward(i, summed, 2.0, 2.0)[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2999, 3000, 5999])  # of the means and the means of squares
@pytest.mark.parametrize("share", [8192, 2560])
def test_a_batch_that_is_not_finite(
    bad: float, place: int, share: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all channels, and a count of 0, by which nothing moves.

    No program of a wide layer reads the whole message: of 2**20 channels that would be 69 GB.
    """
    monkeypatch.setattr(cuda, "_SHARE", share)
    monkeypatch.setitem(cuda._NONFINITE_FLAGS, "SHARE", share)
    summed = steps.pack(wide(3000), wide(3000) ** 2 + 9, 2.0, 2.0)
    summed[place] = bad
    mean, var, count, element_weight = unpack(summed, 3000)
    assert mean.isnan().all()
    assert var.isnan().all()
    assert (count.item(), element_weight.item()) == (0, 0.5)
    refused = unpack(math.nan * summed, 3000)
    assert [v.isnan().all().item() for v in refused] == [True, True, False, True]
    expected = ["nonfinite_flags"] * (share < 6000) + ["finish_forward", "normalize"]
    assert launched == 2 * expected


class Twice(EqualRanks):
    """Two equal ranks; a multiplication stands for the launch of a transport."""

    def allreduce_on_device(self, x: Any, /) -> Any:
        x *= 2
        return x


class Operations(TorchDispatchMode):
    """The names of torch's operations that launch something on a GPU."""

    NO_LAUNCH = (
        *("alias", "detach", "empty", "empty_like", "new_empty"),
        *("select", "slice", "unbind", "view"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_launches_of_a_step(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine, by the verbs; a copy to the host is made of several messages together."""
    monkeypatch.setattr(cuda, "PreparedStep", lambda: None)
    ranks = Twice()
    layer = SyncBatchNorm(3, process_group=ranks).to(DEVICE)
    for _ in range(2):
        x, dy = wide(4, 3, 5).float().requires_grad_(), wide(4, 3, 5).float()
        launched.clear()
        layer.zero_grad()
        with Operations() as operations:
            y = layer(x)
            y.backward(dy)
    assert operations.names == ["mul_", "mul_"]
    assert launched == [
        *("moments", "merge_moments", "finish_forward", "normalize"),
        *("backward_sums", "merge_sums", "input_gradient"),
    ]
    both = torch.cat([x, x]).detach().double().requires_grad_()
    right = torch.nn.functional.batch_norm(both, None, None, training=True)
    right.backward(torch.cat([dy, dy]).double())
    assert both.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(y.double(), right[:4], rtol=0, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), both.grad[:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "relu, masked, affine, dtype, C",
    [
        (False, False, True, "float64", 3),
        (True, False, True, "float32", 300),  # more channels than a program's block of 256
        (False, True, True, "bfloat16", 3),
        (True, True, False, "float32", 3),
    ],
)
def test_the_operators_of_compiled_code_return_the_kernels_coefficients(
    relu: bool, masked: bool, affine: bool, dtype: str, C: int, launched: Any, monkeypatch: Any
) -> None:
    """The operators take six launches; seven if the output's sign is gone."""
    communicator = Twice()
    compiled.register(communicator)
    x, dy = (wide(4, C, 5).to(getattr(torch, dtype)) for _ in range(2))
    mask = (wide(4, 1, 5) > 0) if masked else None
    weight, bias = (wide(C).float() if affine else None for _ in range(2))
    name = communicator.operator_name  # type: ignore[attr-defined]
    options = spec.options_of(NormArgs(x, weight, bias, 1e-5, (0, 2), relu))
    text = repr((name, C, "element", None, (0, 2), options, True, False, None, [], ()))
    args = x, weight, bias, mask
    found = []
    for chosen in (cuda, reference):
        monkeypatch.setattr(compiled, "select", lambda x, chosen=chosen: chosen)
        launched.clear()
        sums = compiled._forward_sums(*args, *[None] * 4, text, None)
        of_backward = dy, *args, None, sums[1], True, text, None
        found.append([*sums, *compiled._backward_sums(*of_backward)])
        assert len(launched) == (6 + relu) * (chosen is cuda)
    for ours, right in zip(*found, strict=True):
        assert ours.dtype == right.dtype
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("momentum", [0.1, None], ids=["n", "cumulative"])
@pytest.mark.parametrize("generic_too", [False, True])
def test_a_batch_that_is_not_finite_leaves_no_trace(
    momentum: float | None, generic_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later steps are, to the last bit, those of a layer that never saw the batch."""
    nonfinite._warned_at = -math.inf
    chosen = reference if generic_too else cuda
    monkeypatch.setattr(kernels, "select", lambda x, *others: chosen)
    layers = [SyncBatchNorm(300, momentum=momentum, process_group=Twice()) for _ in range(2)]
    sees, other = (layer.to(DEVICE) for layer in layers)
    for step in range(4):
        x = wide(4, 300).half().requires_grad_()
        if step == 2:
            with torch.no_grad():
                x[0, 299] = math.inf
            y = sees(x)
            y.sum().backward()
            assert y.isnan().all()
            assert x.grad is not None
            assert x.grad.isnan().all()
            with pytest.warns(
                RuntimeWarning, match=r"skipped a batch in .* rank.s. \[1\] of 2"
            ):  # twice
                flush_checks()
        else:
            assert torch.equal(sees(x), other(x))
        for a, b in zip(sees.buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
def test_sums_of_large_squares_overflow_earlier_than_in_host_memory() -> None:
    """docs/conventions.md: the squares fit into float32, and their sums do not."""
    signs = 1.0 - 2.0 * (torch.arange(2**17, device=DEVICE) % 2)
    for scale, fits in ((1e15, True), (2e18, False)):
        i = NormArgs(scale * signs[:, None], None, None, 1e-5, (0,))
        payload = cuda.begin_forward(i, 1.0, 2.0**17, 2.0**970)
        assert bool(payload[1] < LARGEST) == fits


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_cumulative_average_of_many_channels_is_divided_among_programs(
    momentum: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program of 65,536 channels took five minutes to compile."""
    launches = []
    monkeypatch.setattr(cuda, "launch", lambda *launch: launches.append(launch))
    counter = torch.tensor(0, device=DEVICE)
    running = Running(wide(700), wide(700) ** 2, momentum, num_batches=counter)
    unpack(wide(2 * 700 + 2), 700, running=running)
    kernel, programs, _, constants, *_ = launches[0]
    assert (kernel.__name__, programs, constants["BLOCK"]) == ("finish_forward", 3, 256)
    assert constants["CUMULATIVE"] is (momentum is None)


def test_running_statistics_of_inference_mode_are_moved() -> None:
    """The kernels cannot: they count the versions of what they write."""
    with torch.inference_mode():
        running = Running(wide(3), wide(3) ** 2, 0.1)
        summed, before = steps.pack(wide(3), wide(3) ** 2 + 9, 2.0, 4.0), running.mean.clone()
        unpack(summed, 3, running=running)
        assert torch.equal(running.mean, 0.9 * before + 0.1 * (summed[:3] / 2))
