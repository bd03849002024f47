"""A batch that is not finite: an error on all ranks, or a step that leaves no trace."""

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from multibn import SingleProcess
from multibn import torch_backend as tb
from multibn.communicators import nonfinite as nonfinite_batches
from tests.helpers.ranks import run_ranks

NEEDS = "torch"


@pytest.fixture(autouse=True)
def nobody_has_told() -> None:
    """A new step: a layer warns unless it may have its NaN from the one that warned last."""
    nonfinite_batches._warned_at = -math.inf


def state(model: nn.Module) -> dict[str, Any]:
    return {name: v.clone() for name, v in model.state_dict().items()}


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def bad(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    x = torch.randn(*(shape or (4, 3, 2, 2)), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = torch.inf
    return x


FORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "residual": lambda layer, x: layer(x, torch.ones_like(x)),
    "masked": lambda layer, x: layer(x, mask=torch.ones(len(x), 1, 1, dtype=torch.bool)),
    "compiled": lambda layer, x: torch.compile(layer, backend="aot_eager")(x),
    "transformed": lambda layer, x: torch.func.vmap(lambda v: v)(layer(x)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_skipped_batch_leaves_no_trace_in_any_form(form: str, momentum: float | None) -> None:
    layer = tb.SyncBatchNorm(3, momentum=momentum, nonfinite="skip", fuse_relu=True)
    FORMS[form](layer, bad().nan_to_num(posinf=1.0))
    before = state(layer)
    x = bad().requires_grad_()
    message = r"rank 0 of 1 has skipped a batch in .*on this process"
    with pytest.warns(RuntimeWarning, match=message):
        y = FORMS[form](layer, x)
    y.sum().backward()
    assert x.grad is not None
    assert y.isnan().all()
    assert x.grad.isnan().all()
    assert_same(state(layer), before)
    assert torch.isfinite(FORMS[form](layer, bad().nan_to_num(posinf=1.0))).all()


def test_batches_of_batches_are_an_error() -> None:
    layer = tb.SyncBatchNorm(3, affine=False, track_running_stats=False)
    with pytest.raises(FloatingPointError, match=r"are not finite: .* on this process"):
        torch.func.vmap(torch.func.vmap(layer))(bad(torch.float32, 2, 2, 4, 3))


def test_parts_of_a_batch_and_large_inputs_are_skipped() -> None:
    parts = tb.SubBatchNorm2d(2, 3, nonfinite="skip")
    large = tb.SyncBatchNorm(64, nonfinite="skip")  # by threads
    for layer, x in ((parts, bad()), (large, bad(torch.float32, 8, 64, 56, 56))):
        before = state(layer)
        nonfinite_batches._warned_at = -math.inf
        with pytest.warns(RuntimeWarning, match="has skipped"):
            assert layer(x).isnan().all()
        assert_same(state(layer), before)


@pytest.mark.filterwarnings("ignore:rank 0 of 1 has skipped:RuntimeWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_that_overflows_leaves_no_trace_of_the_others(compiled: bool) -> None:
    layer = tb.convert_sub_batchnorm(tb.SyncBatchNorm(3, nonfinite="skip"), 2)
    before = state(layer)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    y = run(bad())
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()
    assert_same(state(layer), before)


@pytest.mark.parametrize(
    "dtype, nonfinite, skips",
    [
        *((torch.float16, None, True), (torch.float16, "raise", False)),
        *((torch.bfloat16, None, False), (torch.float32, None, False)),
        *((torch.bfloat16, "skip", True), (torch.float64, "skip", True)),
    ],
)
def test_dtype_and_nonfinite_say_whether_a_layer_skips(
    dtype: torch.dtype, nonfinite: Any, skips: bool
) -> None:
    layer = tb.SyncBatchNorm(3, nonfinite=nonfinite)
    before = state(layer)
    functions = (layer, lambda x: tb.sync_batch_norm(x, nonfinite=nonfinite)[0])
    converted = tb.convert_sync_batchnorm(nn.BatchNorm2d(3), SingleProcess(), nonfinite=nonfinite)
    for function in (*functions, converted, copy.deepcopy(layer)):
        if not skips:
            with pytest.raises(FloatingPointError, match="are not finite"):
                function(bad(dtype))
        else:
            nonfinite_batches._warned_at = -math.inf
            with pytest.warns(RuntimeWarning, match="has skipped"):
                assert function(bad(dtype)).isnan().all()
    assert_same(state(layer), before)
    assert repr(layer).endswith(f", nonfinite={nonfinite!r})") == bool(nonfinite)
    with pytest.raises(ValueError, match="`nonfinite` must be one of 'raise', 'skip', None: got"):
        tb.SyncBatchNorm(3, nonfinite="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [tb.SyncBatchNorm, partial(tb.SubBatchNorm2d, 2)])
def test_evaluation_without_running_statistics_does_as_the_layer_says(kind: Any) -> None:
    def layer(nonfinite: Any) -> nn.Module:
        return nn.Sequential(kind(3, track_running_stats=False, nonfinite=nonfinite)).eval()

    with pytest.warns(RuntimeWarning, match="skipped a batch in layer 0, "):
        assert layer("skip")(bad()).isnan().all()
    with pytest.raises(FloatingPointError, match="statistics of layer 0 are not finite"):
        layer("raise")(bad())


@pytest.mark.filterwarnings("ignore:rank 0 of 1 has skipped:RuntimeWarning")
def test_a_step_with_a_skipped_batch_leaves_no_trace() -> None:
    """A gradient scaler skips the whole step: the sum of its gradients has NaN."""
    good, layer = bad().nan_to_num(posinf=1.0), tb.SyncBatchNorm(3, momentum=1.0, nonfinite="skip")
    right = copy.deepcopy(layer)
    for chosen, steps in ((right, [[2 * good]]), (layer, [[good, bad(), 3 * good], [2 * good]])):
        for batches in steps:
            with tb.step_statistics(chosen):
                for x in batches:
                    chosen(x)
    assert_same(state(layer), state(right))


@pytest.mark.filterwarnings("ignore:rank . of 2 has skipped:RuntimeWarning")
@pytest.mark.parametrize("estimator", ["population", "mean_of_var"])
@pytest.mark.parametrize("kind", [tb.SyncBatchNorm, partial(tb.SubBatchNorm2d, 2)])
def test_populations_leave_out_what_other_ranks_have_made_all_skip(
    estimator: Any, kind: Any
) -> None:
    def population(communicator: Any, sees: bool) -> Any:
        layer = kind(3, process_group=communicator, nonfinite="skip")
        generator = torch.Generator().manual_seed(communicator.rank)
        batches = [torch.randn(4, 3, 2, 2, generator=generator) + k for k in range(3)]
        if communicator.rank == 1:
            batches[1][0, 0] = torch.inf
        tb.update_bn_stats(
            nn.Sequential(layer), batches if sees else batches[::2], estimator=estimator,
            process_group=communicator, progress=False,
        )  # fmt: skip
        return state(layer)

    assert_same(*(run_ranks(2, partial(population, sees=sees)) for sees in (True, False)))


@pytest.mark.parametrize("estimator", ["population", "mean_of_var"])
def test_the_first_layer_of_a_pass_tells_of_a_skipped_batch(estimator: Any) -> None:
    handles = SingleProcess(), SingleProcess()
    layers = (tb.SyncBatchNorm(3, process_group=h, nonfinite="skip") for h in handles)
    model = nn.Sequential(*layers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tb.update_bn_stats(model, [bad()], estimator=estimator, progress=False)
    skips = [str(w.message) for w in told if "has skipped" in str(w.message)]
    assert ["in layer 0" in text for text in skips] == [True]


class _Function(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tb.sync_batch_norm(x, nonfinite="skip")[0]


@pytest.mark.filterwarnings("ignore:rank . of 1 has skipped:RuntimeWarning")
@pytest.mark.parametrize(
    "untracked",
    [partial(tb.SyncBatchNorm, 1, track_running_stats=False, nonfinite="skip"), _Function],
    ids=["layer", "function"],
)
def test_a_population_has_the_batches_that_a_later_layer_skips(untracked: Any) -> None:
    xs = [torch.randn(8, 1) + k for k in range(3)]
    first = tb.SyncBatchNorm(1, nonfinite="skip")
    later = nn.Sequential(nn.Hardtanh(-0.1, 0.1), nn.Threshold(0.1, torch.inf))
    tb.update_bn_stats(nn.Sequential(first, later, untracked()), xs, progress=False)
    torch.testing.assert_close(first.running_mean, torch.cat(xs).mean(0))
