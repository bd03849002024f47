"""Layers normalized together in one process: the numbers of the same layers one by one."""

from typing import Any

import pytest

from multibn import SingleProcess
from tests.helpers import require
from tests.helpers.ranks import CountingCommunicator, errors_of_rank_0, run_ranks

require.need("torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from multibn.communicators.lookup import Group  # noqa: E402
from multibn.torch_backend import (  # noqa: E402
    SyncBatchNorm,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    normalize_together,
    update_bn_stats,
)
from tests.torch_backend.convert.test_derived import Activated  # noqa: E402

SHAPES = [(4, 3, 5, 5), (6, 2), (2, 4, 3)]


def _layers(**options: Any) -> Any:
    return nn.ModuleList(
        SyncBatchNorm(shape[1], dtype=torch.float64, fuse_relu=k == 1, **options)
        for k, shape in enumerate(SHAPES)
    )


def _inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [x.to(dtype).requires_grad_() for x in xs]


def one_by_one(layers: Any, xs: Any) -> list[torch.Tensor]:
    return [layer(x) for layer, x in zip(layers, xs, strict=True)]


def train(normalize: Any, layers: Any, xs: list[torch.Tensor]) -> list[Any]:
    ys = normalize(layers, xs)
    sum(y.double().pow(3).sum() for y in ys).backward()
    gradients = [t.grad for t in (*xs, *layers.parameters())]
    return [*ys, *gradients, *layers.state_dict().values()]


CASES = "element", "sample", "rank", "unlike dtypes", "frozen", "evaluation", "autocast"


@pytest.mark.parametrize("case", CASES)
def test_one_message_gives_the_numbers_of_the_layers_one_by_one(case: str) -> None:
    """Of an uneven batch, and a rank without any; frozen layers send nothing."""
    weighting: Any = case if case in ("sample", "rank") else "element"
    dtypes = {"unlike dtypes": (torch.float32, torch.float64, torch.float16)}

    def on_rank(communicator: Any) -> None:
        results, counting = [], CountingCommunicator(communicator)
        for normalize in (one_by_one, normalize_together):
            layers = _layers(
                process_group=counting,
                weighting=weighting,
                momentum=None if case == "rank" else 0.3,
            )
            layers[1].train(case not in ("frozen", "evaluation"))
            layers[::2].train(case != "evaluation")
            xs = [
                x.detach()[: (2, 0, 1)[communicator.rank]].to(dtype).requires_grad_()
                for x, dtype in zip(_inputs(), dtypes.get(case, [torch.float64] * 3), strict=True)
            ]
            counting.take()
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                results.append(train(normalize, layers, xs))
        channels = [layer.num_features for layer in layers if layer.training]
        message = sum(2 * c + 2 for c in channels) + 2
        assert counting.take()[-2:] == ([message] * 2 if channels else [])
        assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)

    run_ranks(3, on_rank)


def test_what_comes_after_may_work_in_place() -> None:
    def block(normalize: Any) -> list[Any]:
        layers, (x, *_) = _layers(), _inputs()
        y, shortcut = normalize([layers[0], layers[0]], [x, 2 * x])
        y += shortcut
        y.relu_().sum().backward()
        return [y, x.grad, *layers[0].state_dict().values()]

    torch.testing.assert_close(block(normalize_together), block(one_by_one), rtol=0, atol=0)


class _Together(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, xs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(normalize_together(self.layers, xs))


@pytest.mark.parametrize("wanted", [(), (0,), (1, 2)])
def test_only_wanted_gradients_are_computed(wanted: tuple[int, ...]) -> None:
    counting = CountingCommunicator(SingleProcess())
    layers = _layers(process_group=counting)
    xs = [x.requires_grad_(k in wanted) for k, x in enumerate(_inputs())]
    train(normalize_together, layers, xs)
    assert [x.grad is not None for x in xs] == [k in wanted for k in range(3)]
    channels = [layer.num_features for layer in layers]
    assert counting.take()[1:] == ([sum(2 * channels[k] for k in wanted)] if wanted else [])


def test_an_output_that_is_not_used_adds_no_gradient() -> None:
    layers, xs = _layers(), _inputs()
    normalize_together(layers, xs)[0].pow(3).sum().backward()
    expected = _inputs()
    _layers()[0](expected[0]).pow(3).sum().backward()
    assert torch.equal(xs[0].grad, expected[0].grad)  # type: ignore[arg-type]
    assert not any(x.grad.any() for x in xs[1:])  # type: ignore[union-attr]


def test_layers_with_hooks_or_a_forward_pass_of_their_own_are_called() -> None:
    """The hooks of `update_bn_stats` among them."""
    own: list[Any] = [convert_sync_batchnorm(Activated(3)), SyncBatchNorm(3)]
    own[1].forward = lambda x: -x
    x = torch.randn(4, 3)
    expected = nn.functional.leaky_relu(SyncBatchNorm(3)(x), 0.1)
    torch.testing.assert_close(normalize_together(own, [x, x]), [expected, -x])
    seen = []
    layers, xs = _layers(), _inputs()
    layers[2].register_forward_hook(lambda *_: seen.append(1))
    normalize_together(layers, xs)
    assert seen == [1]
    model = _Together(_layers())
    update_bn_stats(model, [(xs,)], num_iters=1, progress=False)
    for layer, x in zip(model.layers, xs, strict=True):
        torch.testing.assert_close(layer.running_mean, x.mean([0, *range(2, x.ndim)]))


@pytest.mark.parametrize(
    "layers, num_inputs, error, message",
    [
        (
            [nn.BatchNorm2d(3)],
            1,
            TypeError,
            "must be multibn.*SyncBatchNorm layers: got BatchNorm2",
        ),
        ([], 0, ValueError, "`layers` must be one or more.*got 0 layers, 0 inputs and 0"),
        ([SyncBatchNorm(3)], 2, ValueError, "for each: got 1 layers, 2 inputs and 1 masks"),
        (
            [SyncBatchNorm(3), SyncBatchNorm(3, weighting="rank")],
            2,
            ValueError,
            "the same `weighting`: got 'element' and 'rank'",
        ),
        (
            [SyncBatchNorm(3), SyncBatchNorm(3, process_group=SingleProcess())],
            2,
            ValueError,
            r"the same `process_group`: got DefaultCommunicator\(\) and SingleProcess\(\)",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    layers: Any, num_inputs: int, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        normalize_together(layers, [torch.ones(2, 3, 4, 4)] * num_inputs)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_inputs_that_do_not_fit_are_refused_on_all_ranks(position: int, frozen: bool) -> None:
    wrong_inputs: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(2, 7), ValueError, r"must have [23] channels.*got 7"),
        (None, TypeError, r"must be a torch\.Tensor: got NoneType"),
    ]
    for wrong, kind, message in wrong_inputs:

        def call(is_wrong: bool, group: Any, wrong: Any = wrong) -> None:
            layers, xs = _layers(process_group=group)[:2], _inputs()[:2]
            layers[1].train(not frozen)
            xs[position] = wrong if is_wrong else xs[position]
            normalize_together(layers, xs)

        errors_of_rank_0(call, kind, message)


def test_errors_name_all_layers() -> None:
    """By what they have in common and their own parts of the name."""

    def run(communicator: Any) -> None:
        model = nn.Sequential(_Together(_layers(process_group=communicator)))
        xs = [x.detach() * (torch.inf if communicator.rank else 1) for x in _inputs()]
        message = r"of layer 0\.layers\.0, .*\.1, .*\.2 are not finite.*rank\(s\) \[1\]"
        with pytest.raises(FloatingPointError, match=message):
            model(xs)

    run_ranks(2, run)


def test_groups_are_equal_that_name_the_same_ranks() -> None:
    layers = [SyncBatchNorm(3, process_group=Group(None, 1)) for _ in range(2)]
    assert len(normalize_together(layers, [torch.ones(2, 3)] * 2)) == 2


def test_a_layer_refuses_the_dimensions_that_its_call_refuses() -> None:
    layers, xs = (
        [SyncBatchNorm2d(3), SyncBatchNorm2d(3)],
        [torch.ones(4, 3, 2, 2), torch.ones(4, 3)],
    )
    with pytest.raises(ValueError, match="of SyncBatchNorm2d must have 4 dimensions"):
        normalize_together(layers, xs)
