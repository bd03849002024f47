"""convert_sync_batchnorm and revert_sync_batchnorm."""

import re
import warnings
from functools import partial
from itertools import product
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

from multibn import Group, SingleProcess
from multibn import torch_backend as tb
from multibn.torch_backend.layer.base import LayerOptions
from tests.helpers.ranks import errors_of_rank_0
from tests.torch_backend.convert.test_class_swap import Activated2d

NEEDS = "torch"


class Renamed(nn.BatchNorm2d):
    """A subclass without a forward pass of its own."""


class SyncActivated(nn.SyncBatchNorm):
    """A subclass of the class that DistributedDataParallel refuses on CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Foreign(nn.Module):
    """Norms of its own, as torch_geometric's HeteroBatchNorm."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))


class EvoNorm(nn.Module):
    """Buffers as those of timm's EvoNorm2dB0, which has the variance of the batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running_var", torch.ones(3))


def own(*names: str, **options: Any) -> nn.Module:
    """A module of the user's own, with these options, a weight, and vectors as buffers."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(3))
    for name in names:
        module.register_buffer(name, torch.ones(3))
    for name, value in options.items():
        setattr(module, name, value)
    return module


class OwnSync(tb.SyncBatchNorm):
    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        return super().forward(input, residual, **options).relu()


def test_everything_is_kept() -> None:
    old: Any = nn.BatchNorm2d(3, eps=0.1, momentum=0.3, dtype=torch.float64).eval()
    old.bias.requires_grad_(False)
    old.qconfig = "some configuration"
    calls: list[str] = []
    old.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    before, model = dict(vars(old)), nn.Sequential(nn.Conv2d(1, 3, 1), old)
    tensors = [*old.parameters(), *old.buffers()]
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected = old(x)
    assert tb.convert_sync_batchnorm(model, SingleProcess()) is model
    new: Any = model[1]
    assert new is old
    assert type(new) is tb.SyncBatchNorm2d
    assert before.items() <= vars(new).items()
    assert all(a is b for a, b in zip(tensors, [*new.parameters(), *new.buffers()], strict=True))
    torch.testing.assert_close(new(x), expected)
    assert calls == ["pre-hook"] * 2


@pytest.mark.parametrize(
    "cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, Renamed]
)
def test_revert_restores_the_class(cls: Any) -> None:
    """A model that is a layer stays the same object."""
    layer: Any = cls(3)
    before = dict(vars(layer))
    assert tb.convert_sync_batchnorm(layer, weighting="rank", running_var="biased") is layer
    assert (layer.weighting, layer.running_var_convention) == ("rank", "biased")
    assert tb.revert_sync_batchnorm(layer) is layer
    assert type(layer) is cls
    assert vars(layer) == before


def test_a_layer_built_as_one_reverts_and_converts_to_the_same_class() -> None:
    """It takes what it took: any dimensions, masks, residuals, another dtype in evaluation."""
    back: Any = tb.revert_sync_batchnorm(nn.Sequential(tb.SyncBatchNorm(3)))[0]
    assert type(back) is tb.BatchNorm
    for shape in ((4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)):
        back(torch.randn(shape))
    with pytest.raises(ValueError, match=r"at least 2D input \(got 1D input\)"):
        back(torch.randn(3))
    layer: Any = tb.convert_sync_batchnorm(back)
    assert type(layer) is tb.SyncBatchNorm
    x = torch.randn(4, 3, dtype=torch.float64)
    y = layer(x, x, mask=torch.tensor([True, True, True, False]))
    assert y[:3].abs().sum() > 0
    assert not y[3].any()
    assert layer.eval()(x).dtype == torch.float64
    split: Any = tb.convert_sub_batchnorm(tb.revert_sync_batchnorm(layer.train()), 2)
    torch.testing.assert_close(split(x).view(2, 2, 3).mean(1), torch.zeros(2, 3).double())
    assert type(tb.revert_sync_batchnorm(split)) is tb.BatchNorm


@pytest.mark.parametrize(
    "options, named",
    [
        ({"weighting": "rank"}, "weighting='element'"),
        ({"running_var": "biased", "nonfinite": "skip"}, "running_var='.*', nonfinite=None"),
        ({"process_group": Group(None, 1)}, r"process_group=SingleProcess\(\)"),
        ({"process_group": SingleProcess(), "strict": True}, ""),
    ],
)
def test_other_options_of_layers_that_share_are_named(options: dict[str, Any], named: str) -> None:
    group = SingleProcess()
    first: Any = tb.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), group)
    both: Any = nn.Sequential(first[0], nn.BatchNorm2d(3))
    for model in (first, both):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tb.convert_sync_batchnorm(model, **options)
        said = "".join(str(w.message) for w in seen)
        is_named = bool(named) and not ("process_group" in options and model is both)
        pattern = (
            rf"1 layer.* already synchronized .*: 0 \({named}. Call revert_sync_batchnorm first\)\."
        )
        assert re.fullmatch(pattern if is_named else "", said)
        assert first[0].norm_options == LayerOptions()
        assert first[0].process_group is group
    for name in {"weighting", "running_var", "nonfinite"} & options.keys():
        assert getattr(both[1].norm_options, name) == options[name]


def test_what_never_shares_is_not_named() -> None:
    """Frozen norms as torchvision's, norms that have statistics of each sample, and None."""
    frozen = nn.Module()
    for name in ("weight", "bias", "running_mean", "running_var"):
        frozen.register_buffer(name, torch.ones(3))
    others = [
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
        tb.SubBatchNorm2d(2, 3),
    ]
    model: Any = nn.Sequential(frozen, *others, nn.BatchNorm2d(3))
    model.register_module("absent", None)
    before = list(model.modules())
    assert list(tb.convert_sync_batchnorm(model, strict=True).modules()) == before
    assert model.absent is None


@pytest.mark.parametrize(
    "layer",
    [
        own("regular_running_var"),  # escnn's
        own("running_mean"),
        own("moving_mean", "moving_variance"),
        own("avg_var"),
        own(running_var=torch.ones(3)),  # no buffer
        own(running_var=nn.Parameter(torch.ones(3), requires_grad=False)),
        own(num_batches_tracked=torch.tensor(0)),
        own("m", track_running_stats=True),
        own("m", "v", momentum=0.1, eps=1e-5),
        own("m", "v", momentum=0.1, epsilon=1e-3),
    ],
)
def test_statistics_under_any_names_are_named(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.BatchNorm1d(3))
    message = r"^1 layer\(s\) .*: 0 \(torch.*Module: it is not a subclass of torch's batch norm"
    with pytest.raises(TypeError, match=message):
        tb.convert_sync_batchnorm(model, strict=True)
    assert type(model[1]) is nn.BatchNorm1d


def quantized() -> list[nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        observer = torch.ao.quantization.HistogramObserver()
        fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    return [observer, fake]


@pytest.mark.parametrize(
    "layer",
    [
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3)),
        *quantized(),
        own("embed", "embed_avg", "cluster_size", decay=0.99, eps=1e-5),  # a VQ-VAE's codebook
        own("queue", momentum=0.999, eps=1e-6),  # of a momentum encoder
        own("m", "v", track_running_stats=False, momentum=0.1, eps=1e-5),
        own(track_running_stats=True, momentum=0.1, eps=1e-5),
    ],
)
def test_other_buffers_are_no_running_statistics(layer: nn.Module) -> None:
    tb.convert_sync_batchnorm(nn.Sequential(layer, nn.BatchNorm1d(3)), strict=True)


def unconvertible() -> dict[str, tuple[nn.Module, str]]:
    parametrized = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched: Any = nn.SyncBatchNorm(3)
    patched.forward = patched.forward
    named: Any = nn.BatchNorm2d(3)
    named.step_accumulator = 2
    private: Any = nn.BatchNorm2d(3)
    private._num_splits = 2
    has, lazy = "BatchNorm2d: it has an attribute", "LazyBatchNorm2d: it is a lazy module that is"
    sub = "SyncActivated: it is a subclass of nn.SyncBatchNorm with its own"
    return {
        "private": (private, f"{has} '_num_splits', a name that SyncBatchNorm uses."),
        "named": (named, f"{has} 'step_accumulator', a name that SyncBatchNorm uses."),
        "parametrized": (parametrized, "ParametrizedBatchNorm2d: it is parametrized. Remove"),
        "lazy": (nn.LazyBatchNorm2d(), f"{lazy} not initialized. Run the model"),
        "act": (SyncActivated(3), sub),
        "patched": (patched, "SyncBatchNorm: its `forward` was replaced on the instance. Convert"),
        "foreign": (Foreign(3), "Foreign: it is not a subclass of torch's batch norm"),
        "evo": (EvoNorm(), "EvoNorm: it is not a subclass of torch's batch norm"),
    }


def test_what_cannot_be_converted_is_one_message() -> None:
    layers = unconvertible()
    model = nn.ModuleDict({name: layer for name, (layer, _) in layers.items()})
    model["more"] = nn.Sequential(nn.BatchNorm2d(3), *(EvoNorm() for _ in range(43)))
    classes = [type(part) for part in model.modules()]
    told = r"^51 layer\(s\) cannot be converted; their statistics will not"
    with pytest.raises(TypeError, match=told):
        tb.convert_sync_batchnorm(model, strict=True)
    assert [type(part) for part in model.modules()] == classes
    with pytest.warns(UserWarning, match=r"^51 layer\(s\) cannot be converted") as caught:
        tb.convert_sync_batchnorm(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    for name, (_, why) in layers.items():
        where = "evo, more.1, more.2 and 41 more" if name == "evo" else name
        assert re.search(rf"{where} \([a-z_.]*{re.escape(why)}", message), message
    classes[-44] = tb.SyncBatchNorm2d
    assert [type(part) for part in model.modules()] == classes
    with pytest.warns(UserWarning, match=r"the model itself \(.*Foreign"):
        tb.convert_sync_batchnorm(Foreign(3))


@pytest.mark.parametrize(
    "function", [tb.convert_sync_batchnorm, tb.convert_sub_batchnorm, tb.revert_sync_batchnorm]
)
def test_the_type_that_comes_in_is_that_which_comes_back(function: Any) -> None:
    hints = get_type_hints(function)
    assert hints["return"] is hints["module"]
    assert hints["module"].__bound__ is nn.Module


def test_what_is_no_model_or_has_no_batch_norm_is_named() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    functions: Any = tb.convert_sync_batchnorm, partial(tb.convert_sub_batchnorm, num_splits=2)
    for function in (*functions, tb.revert_sync_batchnorm):
        for wrong, name in ((None, "NoneType"), (optimizer, "SGD"), ([nn.Linear(1, 1)], "list")):
            with pytest.raises(TypeError, match=rf"must be a torch\.nn\.Module: got {name}\."):
                function(wrong)
    keras = type("Functional", (nn.Module,), {"__module__": "keras.src.models.functional"})
    for model, convert in product((nn.Sequential(nn.GroupNorm(1, 3)), keras()), functions):
        message = rf"no batch norm layer of torch: got \S+\.{type(model).__name__}\. Nothing"
        with pytest.raises(TypeError, match=message):
            convert(model, strict=True)
        with pytest.warns(UserWarning, match=message) as caught:
            assert convert(model) is model
        assert caught[0].filename == __file__
    tb.convert_sync_batchnorm(tb.SyncBatchNorm(3), strict=True)


class AnyBut3(nn.BatchNorm2d):
    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim == 3:
            raise ValueError("not three")


class Unchecked(nn.modules.batchnorm._BatchNorm):
    pass


@pytest.mark.parametrize(
    "cls, shape, message",
    [
        (nn.BatchNorm2d, (4, 3), r"expected 4D input \(got 2D input\)"),
        (Renamed, (4, 3, 2), "expected 4D input"),
        (Activated2d, (4, 3, 2), "^expected 4D input"),
        (AnyBut3, (4, 3, 2), "not three"),
    ],
)
def test_a_converted_layer_refuses_what_its_class_does(cls: Any, shape: Any, message: str) -> None:
    x = torch.randn(shape)

    def call(wrong: bool, group: Any) -> None:
        tb.convert_sync_batchnorm(cls(3), group)(x if wrong else torch.randn(2, 3, 4, 4))

    errors_of_rank_0(call, ValueError, message)
    with pytest.raises(ValueError, match=message):
        tb.convert_sync_batchnorm(cls(3)).eval()(x)
    for takes_all in (AnyBut3(3), nn.SyncBatchNorm(3), Unchecked(3)):
        tb.convert_sync_batchnorm(takes_all)(torch.randn(4, 3))


def test_what_cannot_be_reverted_is_one_message() -> None:
    parametrized = tb.SyncBatchNorm(3)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched: Any = tb.SyncBatchNorm(3)
    patched.forward = patched.forward
    layers = {
        OwnSync(3): f"0 ({__name__}.OwnSync: its class overrides forward, which",
        parametrized: "1 (torch.nn.utils.parametrize.ParametrizedSyncBatchNorm: it is parametrized",
        tb.SyncBatchNorm(3, fuse_relu=True): "it has fuse_relu=True, which would be lost",
        patched: "its `forward` was replaced on the instance, which would be lost",
        tb.SubBatchNorm2d(2, 3): "SubBatchNorm2d: its splits keep separate running statistics",
    }
    model: Any = nn.Sequential(*layers, tb.SyncBatchNorm(3))
    told = r"^5 layer\(s\) could not be reverted and stay syn"
    with pytest.warns(UserWarning, match=told) as caught:
        tb.revert_sync_batchnorm(model)
    assert len(caught) == 1
    for message in layers.values():
        assert message in str(caught[0].message)
    assert list(model[:5]) == list(layers)
    assert type(model[5]) is tb.BatchNorm
