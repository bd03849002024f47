"""The reversible MViT against the original's numbers, and what the original gets wrong."""

import copy
import dataclasses
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multibn.torch_backend import NaiveSyncBatchNorm1d, SubBatchNorm1d, SyncBatchNorm
from multibn.torch_backend.reversible import RevMViT, RevMViTConfig
from multibn.torch_backend.reversible.mvit import layers
from multibn.torch_backend.reversible.mvit.model import resize_positions
from multibn.torch_backend.reversible.mvit.sizes import round_width
from tests.torch_backend.reversible.blocks import error
from tests.torch_backend.reversible.mvit import reference
from tests.torch_backend.reversible.mvit.reference import REFERENCE, VIDEO, images, small

NEEDS = "torch"

MODES = ["reversible", "stored"]
GROUPED: Any = lambda dim, role: NaiveSyncBatchNorm1d(1, num_features=dim)  # noqa: E731
SUB: Any = lambda dim, role: SubBatchNorm1d(2, dim)  # noqa: E731
FUSIONS = ["avg", "concat", "concat_linear_2", "ln+concat_linear_0.5_0.1"]


def transition(model: RevMViT, index: int = 1) -> layers.StageTransitionBlock:
    layer = model.rev_backbone.layers[index]
    assert isinstance(layer, layers.StageTransitionBlock)
    return layer


def step(model: RevMViT, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one training step."""
    y = model(x)
    (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# --- the original -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFERENCE)
def test_the_model_gives_the_originals_numbers(name: str, mode: Any) -> None:
    case = REFERENCE[name]
    model = RevMViT.from_config(reference.slowfast_config(case), mode=mode).double()
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert list(shapes.items()) == list(case["params"].items())  # names, shapes and their order
    model.load_state_dict(
        {key: reference.reference_weight(key, tuple(shape)) for key, shape in shapes.items()}
    )
    x = reference.reference_input(case["config"]["PATCH_2D"])
    logits = model(x)
    reference.reference_loss(logits).backward()

    expected = torch.tensor(case["logits"], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    tolerance = 1e-9 * case["grad_global_norm"]
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        norm, total, *first = case["grads"][key]
        assert abs(float(parameter.grad.norm()) - norm) <= tolerance
        assert abs(float(parameter.grad.sum()) - total) <= tolerance * parameter.numel() ** 0.5
        assert parameter.grad.flatten()[:3].tolist() == pytest.approx(first, rel=0, abs=tolerance)
    assert x.grad is not None
    assert float(x.grad.norm()) == pytest.approx(case["input_grad"]["norm"], rel=1e-9)
    assert x.grad.flatten()[:4].tolist() == pytest.approx(case["input_grad"]["head"], rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"pool_first": True, "residual_pooling": True},
        {"pool_first": True, "pool_mode": "conv_unshared", "pre_q_fusion": "concat"},
        {"pool_mode": "avg", "crop_size": 64},
        {"pool_mode": "max", "pool_kvq_kernel": None},
        {"norm_stem": True, "use_mean_pooling": True, "respath_fuse": "concat_linear"},
        {**VIDEO, "rel_pos_spatial": True, "rel_pos_temporal": True, "sep_pos_embed": True},
        {**VIDEO, "pool_q_stride": ((1, 2, 2, 2), (3, 1, 2, 2)), "rel_pos_temporal": True},
        {"use_fixed_sincos_pos": True, "sep_pos_embed": True, "pre_q_fusion": "ln+concat_linear_2"},
        {"use_abs_pos": False, "pool_kv_stride_adaptive": None, "separate_qkv": True},
        {"dropout_rate": 0.2, "droppath_rate": 0.3, "head_dropout_rate": 0.5},
        {"droppath_rate": 0.3, "drop_path_mode": "whole"},
        {"respath_fuse": "add", "use_mean_pooling": True},
        {"respath_fuse": "max"},
        {"norm": "batchnorm", "pre_q_fusion": "ln+concat_linear", "norm_stem": True},
        {"norm": "sync_batchnorm", "pre_q_fusion": "ln+concat_linear", "norm_stem": True},
        {"norm": GROUPED, **VIDEO},
        {"norm": SUB, **VIDEO},
    ],
    ids=lambda options: " ".join(key for key in options if key not in VIDEO or key == "num_frames"),
)
def test_reversible_mode_gives_the_numbers_of_stored_mode(options: dict[str, Any]) -> None:
    x = images(4, options.get("crop_size", 32))
    x = x if options.get("patch_2d", True) else torch.stack([x, x.flip(3), -x, x.flip(2)], dim=2)
    results = []
    for mode in MODES:
        model = small(mode=mode, **options)
        torch.manual_seed(5)
        y, grads = step(model, x)
        assert len(grads) == sum(p.requires_grad for p in model.parameters())
        # Also the random numbers after the step, and what batch norms count.
        results.append((grads, [y, torch.rand(1), *model.buffers()]))
    (grads, others), (stored_grads, stored_others) = results
    assert all(map(torch.equal, others, stored_others))
    assert grads.keys() == stored_grads.keys()
    assert error([*grads.values()], [*stored_grads.values()]) < 1e-9


@pytest.mark.parametrize("mode", ["auto", "reversible"])
def test_evaluation_is_ordinary_autograd(mode: str) -> None:
    """It is so in each mode, as in the original: one graph, and gradients of gradients."""
    x = images().requires_grad_()
    expected, model = (small(mode=m, dropout_rate=0.5).eval() for m in ("stored", mode))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected(x))
    (saliency,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(saliency.square().sum(), x)[0].norm() > 0


def test_frozen_blocks_are_recomputed_in_training_by_name() -> None:
    counts = []
    for mode in ("reversible", "auto"):
        model = small(mode=mode)
        model.rev_backbone.layers.eval()
        calls: list[Any] = []
        block: Any = model.rev_backbone.layers[0]
        block.F.register_forward_hook(lambda *_: calls.append(0))  # noqa: B023
        step(model, images())
        counts.append(len(calls))
    assert counts == [2, 1]


# --- defects of the original --------------------------------------------------------------------


def test_defect_5_a_dropped_sample_keeps_its_residual() -> None:
    """Each branch is skipped or doubled at rate 1/2; "whole" zeroes or doubles what comes out."""
    block = transition(small(droppath_rate=0.5, drop_path_mode="residual_branch"))
    whole = transition(small(droppath_rate=0.5, drop_path_mode="whole"))
    block.drop_path = whole.drop_path = 0.5
    thw = (1, 8, 8)
    x = torch.randn(32, 64, 32, dtype=torch.float64)

    with torch.no_grad():
        y, _ = block(x, thw)
        skip, _ = block._residual(block.pre_q_fuse(x), thw)
        attended = block.F(block.pre_q_fuse(x), thw)
        branches = []
        for scale_f in (0, 2):
            middle = skip + scale_f * attended
            branches += [middle, middle + 2 * block.G(middle)]
        errors = torch.stack([(y - branch).abs().amax((1, 2)) for branch in branches])
        assert errors.amin(0).max() < 1e-12
        assert set(errors.argmin(0).tolist()) == {0, 1, 2, 3}

        y, _ = whole(x, thw)
        zeroed = y.abs().amax((1, 2)) == 0
        assert 0 < zeroed.sum() < 32
        torch.testing.assert_close(y[~zeroed], 2 * whole.eval()(x, thw)[0][~zeroed])


@pytest.mark.parametrize("fusion", FUSIONS)
def test_defect_15_model_is_picklable(fusion: str) -> None:
    options: dict[str, Any] = {"respath_fuse": fusion, "pre_q_fusion": fusion}
    model = small(**options, use_mean_pooling=True)
    expected = model.eval()(images(2))
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(copied(images(2)), expected)


@pytest.mark.parametrize("pre_q_fusion", ["avg", "concat"])
@pytest.mark.parametrize("pool_first", [False, True])
def test_defect_19_residual_has_its_own_batch_norm(pre_q_fusion: str, pool_first: bool) -> None:
    model = small(norm="batchnorm", pre_q_fusion=pre_q_fusion, pool_first=pool_first)
    step(model, images())
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    assert sum(n.endswith("norm_res") for n in norms) == 2
    assert {n: int(m.num_batches_tracked or 0) for n, m in norms.items()} == dict.fromkeys(norms, 1)
    block: Any = transition(model)
    assert isinstance(block.norm_res, nn.BatchNorm1d)
    assert isinstance(block.F.attn.norm_q, nn.BatchNorm1d)
    mean, mean_q = block.norm_res.running_mean, block.F.attn.norm_q.running_mean
    assert mean is not None
    assert mean_q is not None
    assert not torch.allclose(mean, mean_q)
    assert transition(small(norm="layernorm")).norm_res is None  # published state dicts


# --- norms --------------------------------------------------------------------------------------


def test_a_norm_can_be_chosen_by_its_role() -> None:
    roles = []

    def norm(dim: int, role: Any) -> nn.Module:
        roles.append(role)
        return nn.BatchNorm1d(dim) if role == "pool" else nn.RMSNorm(dim)

    model = small(norm=norm, norm_stem=True, pre_q_fusion="ln+concat_linear")
    assert set(roles) == {"block", "pool", "residual", "fuse", "stem", "final"}
    assert isinstance(model.rev_backbone.layers[0].F.norm, nn.RMSNorm)
    _, grads = step(model, images())
    assert len(grads) == len(list(model.parameters()))


# --- the classifier -----------------------------------------------------------------------------


def test_images_may_have_other_resolutions() -> None:
    """Weights know nothing of the size of the image where there are no position embeddings."""
    options: dict[str, Any] = {"use_abs_pos": False}
    y = small(**options)(images(2, 64))
    assert torch.equal(y, small(**options, crop_size=64)(images(2, 64)))
    model = small(rel_pos_spatial=True)
    _, grads = step(model, images(2, 64)[..., :40])  # not square, and not the configured one
    assert len(grads) == len(list(model.parameters()))


def test_the_head_activates_in_evaluation_only() -> None:
    x = images(2)
    with torch.no_grad():  # with gradients, attention is another kernel in evaluation
        logits = small(head_act="none").eval()(x)
    assert torch.equal(small().train()(x), logits)
    torch.testing.assert_close(small().eval()(x), logits.softmax(1))
    torch.testing.assert_close(small(head_act="sigmoid").eval()(x), logits.sigmoid())
    assert torch.equal(small().train()([x]), logits)  # SlowFast's list of pathways
    model = small(detach_final_fc=True)
    _, grads = step(model, x)
    assert set(grads) == {"head.projection.weight", "head.projection.bias"}


@torch.no_grad()
def test_initial_weights_have_their_scale() -> None:
    torch.manual_seed(0)
    config = small().config
    weights = RevMViT(config).state_dict()
    for name, value in (
        ("rev_backbone.layers.1.G.mlp.fc1.bias", 0.02),
        ("norm.weight", 1.0),
        ("norm.bias", 0.02),
    ):
        assert torch.equal(weights[name], torch.full_like(weights[name], value))
    for name in ("rev_backbone.layers.1.G.mlp.fc1.weight", "pos_embed", "patch_embed.proj.weight"):
        assert float(weights[name].std()) == pytest.approx(0.02, rel=0.1)
    silent = RevMViT(dataclasses.replace(config, head_init_scale=0.0))
    assert not any(p.any() for p in silent.head.parameters())


def test_no_weight_decay_names_the_positions() -> None:
    names = small(rel_pos_spatial=True).no_weight_decay()
    assert "pos_embed" in names
    assert "rev_backbone.layers.4.F.attn.rel_pos_h" in names
    assert len(names) == 11
    assert small(zero_decay_pos_cls=False).no_weight_decay() == []


def test_input_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`x` must be images \(B, C, H, W\).*\(3, 32, 32\)"):
        small()(images(1)[0])
    with pytest.raises(ValueError, match=r"`x` must be video \(B, C, T, H, W\) with"):
        small(**VIDEO)(images(1))


# --- parts: norms of the last axis, positions, fusions ------------------------------------------


@pytest.mark.parametrize(
    "width, multiplier, divisor, expected",
    [(96, 1.0, 1, 96), (96, 2.0, 8, 192), (10, 1.0, 4, 12), (9, 1.0, 4, 12), (13, 1.0, 4, 12)],
)
def test_widths_are_rounded_and_lose_a_tenth_at_most(
    width: int, multiplier: float, divisor: int, expected: int
) -> None:
    assert round_width(width, multiplier, divisor) == expected


@pytest.mark.parametrize("shape", [(6, 5), (6, 7, 5), (6, 2, 7, 5)])
@pytest.mark.parametrize(
    "make, splits",
    [(nn.BatchNorm1d, 1), (SyncBatchNorm, 1), (partial(SubBatchNorm1d, 2), 2)],
    ids=["torch", "synchronized", "sub"],
)
def test_batch_norms_normalize_the_last_axis(make: Any, splits: int, shape: Any) -> None:
    x = 3 + 2 * torch.randn(shape, dtype=torch.float64)
    y = layers.normalize_last_axis(make(5).double(), x)
    axes = tuple(range(len(shape) - 1))
    for k in range(splits):
        part = x[k::splits]
        expected = (part - part.mean(axes)) / (part.var(axes, correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(y[k::splits], expected, rtol=0, atol=1e-6)  # torch's is coarser


def test_relative_positions_are_resized_to_another_grid() -> None:
    table = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]  # distances of 3 positions
    q = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    bias = layers.relative_position_bias(q, (1, 1, 6), (1, 1, 6), {2: table})
    assert (bias[0, 0].diff(dim=0) >= 0).all()
    assert bias.min() == -1
    assert bias.max() == 1


def test_positions_are_resized_to_another_grid() -> None:
    ramp = torch.arange(4.0).repeat(2, 3, 1)[..., None].flatten(0, 2)[None]  # by column
    wider = resize_positions(ramp, (2, 3, 4), (2, 6, 8)).unflatten(1, (2, 6, 8))
    assert wider[0, 1, 3, :, 0].tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert resize_positions(ramp, (2, 3, 4), (2, 3, 4)) is ramp


@pytest.mark.parametrize(
    "mode, function", [("add", torch.add), ("max", torch.maximum), ("min", torch.minimum)]
)
def test_a_fusion_by_element_is_its_function(mode: str, function: Any) -> None:
    a, b = torch.randn(2, 3, 5, 4)
    fusion = layers.TwoStreamFusion(mode, 8, RevMViTConfig())
    assert torch.equal(fusion(torch.cat([a, b], dim=-1)), function(a, b))


def test_numbers_of_a_fusion_are_its_mlps_width_and_dropout() -> None:
    for mode, width, drop in (("ln+concat_linear_0.5_0.1", 4, 0.1), ("ln+concat_linear", 8, 0)):
        fusion: Any = layers.TwoStreamFusion(mode, 8, RevMViTConfig())
        assert fusion.state_dict()["fuse_fn.1.fc1.weight"].shape == (width, 8)
        assert fusion.fuse_fn[1].drop.p == drop
