"""Sub-batch norm in one process, against the formulas of SlowFast's layer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from multibn.torch_backend import SubBatchNorm1d, SubBatchNorm2d, SubBatchNorm3d, step_statistics
from multibn.torch_backend.layer.base import has_hooks
from tests.helpers import slowfast
from tests.helpers.ranks import errors_of_rank_0, run_ranks
from tests.helpers.spread import spread
from tests.torch_backend.steps import step

NEEDS = "torch"

C = 3
# For an even number of samples, per class: torch's own class and a shape.
DIMENSIONS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "1d": (SubBatchNorm1d, nn.BatchNorm1d, (24, C)),
    "1d-long": (SubBatchNorm1d, nn.BatchNorm1d, (12, C, 7)),
    "2d": (SubBatchNorm2d, nn.BatchNorm2d, (12, C, 5, 4)),
    "3d": (SubBatchNorm3d, nn.BatchNorm3d, (12, C, 2, 5, 4)),
}
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(
        memory_format=torch.channels_last_3d if x.ndim == 5 else torch.channels_last
    ),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch innermost": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}

make: Any = SubBatchNorm3d


def trained(steps: int = 3, num_splits: int = 2, **options: Any) -> Any:
    layer = make(num_splits, C, **options)
    for seed in range(steps):
        torch.manual_seed(seed)
        layer((1 + torch.arange(8.0).view(8, 1, 1, 1, 1)) * torch.randn(8, C, 2, 3, 3) + 5)
    return layer


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 1.0},
]


def test_the_state_is_laid_out_as_slowfasts() -> None:
    buffers = ["running_mean", "running_var", "num_batches_tracked"]
    inner = [f"{bn}.{name}" for bn in ("bn", "split_bn") for name in buffers]
    layer = trained(num_splits=4)
    assert list(layer.state_dict()) == ["weight", "bias", *inner]
    assert layer.state_dict()["split_bn.running_var"].shape == (4 * C,)
    assert list(make(2, C, affine=False).state_dict()) == inner
    assert list(make(2, C, bias=False).state_dict()) == ["weight", *inner]
    assert list(make(2, C, track_running_stats=False).state_dict()) == ["weight", "bias"]
    assert all(isinstance(bn, nn.BatchNorm3d) and not bn.affine for bn in layer.children())


@pytest.mark.parametrize(
    "dtype, apart, bound", [(torch.float64, 1, 1e-10), (torch.float32, 0, 2e-5)]
)
def test_biased_aggregation_loses_no_digits(dtype: Any, apart: int, bound: float) -> None:
    """Mean 1e4, standard deviation 1; the buffers round such a mean by 5e-4 in float32."""
    layer = make(2, C, momentum=1.0, running_var="biased", dtype=dtype)
    torch.manual_seed(0)
    x = torch.randn(64, C, 4, 4, 4, dtype=dtype) + 1e4
    x[::2] += apart
    layer(x)
    var, mean = torch.var_mean(x.double(), (0, 2, 3, 4), correction=0)
    torch.testing.assert_close(layer.bn.running_mean.double(), mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(layer.bn.running_var.double(), var, rtol=bound, atol=0)
    means, variances = (
        getattr(layer.split_bn, name).double().view(2, C)
        for name in ("running_mean", "running_var")
    )
    of_buffers = variances.mean(0) + means.var(0, correction=0)
    torch.testing.assert_close(layer.bn.running_var.double(), of_buffers, rtol=1e-7, atol=0)


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_the_state_of_a_plain_batch_norm_loads(num_splits: int) -> None:
    """What SlowFast saves: its checkpoints hold plain batch norms."""
    plain: Any = nn.BatchNorm3d(C)
    plain(torch.randn(8, C, 2, 3, 3) + 5)
    model = nn.Sequential(make(num_splits, C))
    for assign in (False, True):
        model.load_state_dict(nn.Sequential(plain).state_dict(), strict=True, assign=assign)
    layer: Any = model[0]
    x = torch.randn(4, C, 2, 3, 3)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))
    torch.testing.assert_close(
        layer.split_bn.running_mean.view(num_splits, C), plain.running_mean.expand(num_splits, C)
    )
    assert layer.split_bn.num_batches_tracked is not layer.bn.num_batches_tracked
    layer.train()(x)
    assert int(layer.bn.num_batches_tracked) == int(layer.split_bn.num_batches_tracked) == 2


def test_the_state_of_any_number_of_splits_loads() -> None:
    source = trained(num_splits=4)
    own, whole = source.split_bn.running_var, source.bn.running_var
    for num_splits in (1, 2, 4, 8):
        layer = make(num_splits, C)
        layer.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(layer.bn.state_dict(), source.bn.state_dict())
        expected = own if num_splits == 4 else whole.repeat(num_splits)
        torch.testing.assert_close(layer.split_bn.running_var, expected)


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for split_bn\.running_mean"):
        make(2, C).load_state_dict(make(2, C + 1).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*split_bn\.running_mean"):
        make(2, C).load_state_dict(
            {k: v for k, v in make(2, C).state_dict().items() if not k.startswith("split_bn")}
        )


def test_parameters_that_do_not_fit_on_one_rank_are_an_error_on_all() -> None:
    """Which is told of by a message as long as that of all splits."""

    def call(wrong: bool, group: Any) -> None:
        layer = make(2, C, process_group=group)
        layer.weight.data = torch.ones(C + wrong)
        layer(torch.ones(4, C, 2, 3, 3))

    errors_of_rank_0(call, ValueError, r"`weight` must have shape \(2, 3\).*got \(2, 4\)")


def test_momentum_is_split_bns() -> None:
    """Loops over a model's batch norms, for momentum schedules, reach it."""
    layer = trained()
    state = copy.deepcopy(layer.state_dict())
    for m in layer.modules():
        if isinstance(m, nn.BatchNorm3d):
            m.momentum = 0.0
    x = torch.randn(4, C, 2, 3, 3)
    layer(x)
    torch.testing.assert_close(layer.split_bn.running_mean, state["split_bn.running_mean"])


def freeze(layer: Any) -> None:
    for m in layer.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            m.eval()


def watch(layer: Any) -> list[list[Any]]:
    """What hooks of every kind will get from the parts of a layer."""
    seen: list[list[Any]] = []
    for part in (layer.bn, layer.split_bn):
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            seen.append([])
            note: Any = lambda part, *tensors, calls=seen[-1]: calls.append(tensors)  # noqa: E731
            getattr(part, f"register_{kind}_hook")(note)
    return seen


@pytest.mark.parametrize(
    "given, way, dimension",
    spread(
        OPTIONS,
        [1, 2, 3, 12, "is hooked", "is frozen", "is frozen and hooked"],
        over=[list(DIMENSIONS)],
    ),
    ids=str,
)
def test_numbers_and_parts_are_slowfasts(dimension: str, given: dict[str, Any], way: Any) -> None:
    """Training, aggregation and evaluation, with all gradients and the state, in so many splits.

    Hooks of the parts get SlowFast's tensors; a frozen split has its own running statistics.
    """
    cls, theirs_cls, shape = DIMENSIONS[dimension]
    num_splits, way = (way, "") if isinstance(way, int) else (2, way)
    theirs = slowfast.SubBatchNorm(theirs_cls, num_splits, C, dtype=torch.float64, **given)
    ours: Any = cls(num_splits, C, dtype=torch.float64, **given)
    if ours.affine:
        theirs.load_state_dict(
            {"weight": torch.randn(C).double(), "bias": torch.randn(C).double()}, strict=False
        )
    ours.load_state_dict(theirs.state_dict(), strict=True)
    seen: list[list[Any]] = []
    of_parts = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 3
    for n, training in enumerate((True, True, True, False)):
        x, dy = torch.randn(shape).double() + of_parts, torch.randn(shape).double()
        results = []
        for layer in (theirs, ours):
            if n == 1 and "hooked" in way:
                seen.append(watch(layer))
            layer.train(training)
            if n and "frozen" in way:
                freeze(layer)
            results.append(step(layer, x, dy))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
        theirs.aggregate_stats()  # ours needs no reminder
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-10)
    if "hooked" in way:
        torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-10)
        assert all(seen[0])


@pytest.mark.parametrize("way", [lambda layer: None, freeze, watch])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_numbers_and_is_kept(layout: str, way: Any) -> None:
    x, dy = (torch.randn(DIMENSIONS["3d"][2]) + n for n in (3, 0))
    x = LAYOUTS[layout](x)
    results = []
    for y_layout in (LAYOUTS[layout], LAYOUTS["contiguous"]):
        layer = trained(momentum=0.5)
        way(layer)
        t = y_layout(x)
        y, dx, *gradients = step(layer, t, dy)
        results.append([y, dx, *gradients, *layer.state_dict().values()])
        if not has_hooks(layer.split_bn) and layout not in ("strided", "expanded"):
            assert y.stride() == t.stride()
            assert way is freeze or dx.stride() == t.stride()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_frozen_and_hooked_layers_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(8, C, 2, 3, 3)
    for way in (freeze, watch):
        for buffers in (torch.float32, dtype):
            layer = trained()
            expected = copy.deepcopy(layer)
            way(expected)
            way(layer)
            y = layer.to(buffers)(x.to(dtype))
            assert y.dtype == dtype
            torch.testing.assert_close(y.float(), expected(x), rtol=0, atol=0.05)


def test_a_frozen_layer_takes_any_batch_that_can_be_split() -> None:
    layer = trained()
    freeze(layer)
    assert layer(torch.zeros(0, C, 2, 3, 3)).shape == (0, C, 2, 3, 3)
    assert layer(torch.zeros(2, C, 1, 1, 1)).isfinite().all()  # one value per split and channel
    with pytest.raises(ValueError, match=r"got 2 splits .* `convert_sub_batchnorm`, which acc"):
        layer(torch.zeros(3, C, 2, 3, 3))


def test_evaluation_may_use_the_statistics_of_the_batch() -> None:
    """Test-time adaptation does so: the batch norms of a model in evaluation train."""
    layer = trained(momentum=1.0).eval()
    layer.bn.train()
    before = copy.deepcopy(layer.split_bn.state_dict())
    x = torch.randn(5, C, 2, 3, 3) + 7
    torch.testing.assert_close(layer(x), nn.functional.batch_norm(x, None, None, training=True))
    torch.testing.assert_close(layer.bn.running_mean, x.mean((0, 2, 3, 4)))
    torch.testing.assert_close(layer.split_bn.state_dict(), before, rtol=0, atol=0)


def test_a_part_of_another_class_is_called() -> None:
    """A tool replaces every nn.BatchNorm3d of a model."""
    ours, theirs = trained(), trained()
    for name in ("bn", "split_bn"):
        part: Any = nn.BatchNorm3d(getattr(ours, name).num_features, affine=False)
        part.load_state_dict(getattr(ours, name).state_dict())
        setattr(theirs, name, part)
    x = torch.randn(4, C, 2, 3, 3)
    for training in (True, False):
        torch.testing.assert_close(theirs.train(training)(x), ours.train(training)(x))
        theirs.aggregate_stats()
        torch.testing.assert_close(theirs.state_dict(), ours.state_dict())


def test_a_part_by_itself_is_torchs_batch_norm() -> None:
    layer = trained()
    x = torch.randn(4, C, 2, 3, 3)
    expected = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(layer.bn(x), expected)


def test_a_hook_of_all_modules_sees_the_part_that_is_called() -> None:
    layer, x, seen = trained(), torch.randn(4, C, 2, 3, 3), []
    expected = copy.deepcopy(layer)(x)
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert seen == [layer.split_bn, layer]


def test_reset_parameters_gives_the_state_of_a_new_layer() -> None:
    layer = trained()
    layer.reset_parameters()
    torch.testing.assert_close(layer.state_dict(), make(2, C).state_dict())
    with torch.device("meta"):
        deferred = make(2, C)
    deferred.to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(deferred.state_dict(), make(2, C).state_dict())


def test_repr_names_the_splits_and_the_conventions() -> None:
    text = repr(make(2, C, weighting="sample"))
    assert "3, process_group=SingleProcess(), weighting='sample', num_splits=2" in text
    assert "affine=False" in repr(make(2, C, affine=False))


@pytest.mark.parametrize("num_splits, n", [(2, 7), (4, 6), (2, 1)])
def test_a_batch_that_cannot_be_split_is_an_error_on_all_ranks(num_splits: int, n: int) -> None:
    x = torch.randn(n, C, 2, 3, 3)
    message = f"`num_splits` must divide the batch size: got {num_splits} splits for a batch of {n}"

    def call(wrong: bool, group: Any) -> None:
        layer = make(num_splits, C, process_group=group)
        try:
            layer(x if wrong else torch.randn(8, C, 2, 3, 3))
        finally:
            assert not layer.split_bn.num_batches_tracked

    errors_of_rank_0(call, ValueError, f"{message} on rank 0")
    alone = make(num_splits, C)
    with pytest.raises(ValueError, match=message):
        alone(x)
    alone.eval()(x)


@pytest.mark.parametrize("training", [True, False])
def test_inputs_of_other_dimensions_are_refused(training: bool) -> None:
    for cls, shape, message in [
        (SubBatchNorm3d, (2, C, 4, 4), "expected 5D input"),
        (SubBatchNorm2d, (2, C), "expected 4D input"),
        (SubBatchNorm1d, (2, C, 4, 4), "expected 2D or 3D input"),
    ]:
        with pytest.raises(ValueError, match=message):
            cls(2, C).train(training)(torch.ones(shape))


@pytest.mark.filterwarnings("ignore:rank 0 of 1 has skipped:RuntimeWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", ["a skipped batch", "an empty batch", "a step in evaluation"])
def test_bn_keeps_loaded_statistics_until_a_batch_moves_it(what: str, compiled: bool) -> None:
    layer: Any = SubBatchNorm1d(2, 1, nonfinite="skip")
    loaded = {"bn.running_mean": torch.ones(1), "bn.num_batches_tracked": torch.tensor(5)}
    layer.load_state_dict(layer.state_dict() | loaded)
    before = {name: v.clone() for name, v in layer.state_dict().items()}
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    x = torch.ones(4, 1)
    if what == "a step in evaluation":
        layer.eval()
        with step_statistics(layer):
            run(x)
    else:
        run(torch.empty(0, 1) if "empty" in what else x / torch.tensor([[0.0], [1.0]] * 2))
    for name, v in layer.state_dict().items():
        assert torch.equal(v, before[name]), name
    layer.train()(torch.randn(4, 1))
    assert layer.bn.num_batches_tracked == layer.split_bn.num_batches_tracked == 1


def test_one_value_per_channel_and_split_is_an_error_on_all_ranks() -> None:
    def run(communicator: Any) -> None:
        n, rank = (0 if communicator.rank else 1), communicator.rank
        message = rf"more than 1 value per .* of shape \({n}, 2, 3\) on rank {rank}"
        layer = SubBatchNorm1d(2, C, process_group=communicator)
        with pytest.raises(ValueError, match=message):
            layer(torch.ones(2 * n, C))
        layer(torch.ones(2, C))  # one value on each rank is enough
        layer.eval()(torch.ones(1, C))

    run_ranks(2, run)


def test_an_exported_layer_without_running_statistics_is_torchs() -> None:
    """The whole batch's statistics, by an operation that a program without multibn has."""
    layer, x = make(2, C, eps=0.3, track_running_stats=False).eval(), torch.randn(5, C, 2, 3, 4)
    program = torch.export.export(layer, (x,))
    assert "multibn" not in str(program.graph)
    mean, var = x.mean((0, 2, 3, 4)), x.var((0, 2, 3, 4), correction=0)
    expected = (x - mean.view(-1, 1, 1, 1)) / (var.view(-1, 1, 1, 1) + 0.3).sqrt()
    torch.testing.assert_close(program.module()(x), expected)
