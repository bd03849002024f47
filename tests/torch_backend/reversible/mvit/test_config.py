"""Published configs and models, and what is refused before a shape error could say it."""

import copy
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from multibn.torch_backend.reversible import ReversibleMViT, RevMViT, RevMViTConfig
from multibn.torch_backend.reversible.mvit.sizes import layer_sizes
from tests.torch_backend.reversible.mvit.reference import DATA, REFERENCE, SMALL, slowfast_config

NEEDS = "torch"

# Parameters, and multiply-adds for one image or clip.
PUBLISHED: dict[str, tuple[int, int]] = {
    "rev_vit_s": (22_434_664, 4_574_410_752),
    "rev_vit_b": (87_335_656, 17_472_417_792),
    "rev_vit_l": (305_350_632, 61_234_429_952),
    "rev_mvit_b": (39_689_320, 8_637_816_576),
    "rev_mvit_b_16x4": (34_963_120, 63_652_357_632),
}
CLS = "CLS_EMBED_ON` is ignored: reversible models have no cls token"


def tree(**changes: Any) -> dict[str, Any]:
    """SlowFast's config of a small model, with other values for keys of MVIT."""
    cfg = copy.deepcopy(slowfast_config(REFERENCE["rev_mvit"]))
    cfg["MVIT"].update(changes)
    return cfg


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.filterwarnings("ignore:.*no cls token")
def test_published_models_have_their_sizes(name: str) -> None:
    with torch.device("meta"):
        model = RevMViT.from_config(DATA / f"{name}.yaml").eval()
        x = torch.empty(1, 3, *([16] if name.endswith("16x4") else []), 224, 224)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    multiply_adds = counter.get_total_flops() // 2
    assert (sum(p.numel() for p in model.parameters()), multiply_adds) == PUBLISHED[name]


def test_published_yaml_is_read_key_by_key() -> None:
    path = DATA / "rev_mvit_b.yaml"
    config = RevMViTConfig(
        num_frames=1, num_classes=1000, head_dropout_rate=0.0, patch_2d=True, separate_qkv=True,
        zero_decay_pos_cls=False, dim_mul=((1, 2.0), (3, 2.0), (14, 2.0)),
        head_mul=((1, 2.0), (3, 2.0), (14, 2.0)), buffer_layers=(1, 3, 14),
        pool_q_stride=((1, 1, 2, 2), (3, 1, 2, 2), (14, 1, 2, 2)), patch_kernel=(7, 7),
        patch_stride=(4, 4), patch_padding=(3, 3), pool_kvq_kernel=(1, 3, 3),
        pool_kv_stride_adaptive=(1, 4, 4), pre_q_fusion="concat_linear_2",
    )  # fmt: skip
    assert RevMViTConfig.from_slowfast(path) == config
    assert RevMViTConfig.from_slowfast(str(path)) == config


def test_published_yaml_of_kinetics_is_read_with_a_warning() -> None:
    """It turns a cls token on, and holds tuples, which yaml reads as strings."""
    with pytest.warns(UserWarning, match=CLS) as caught:
        config = RevMViTConfig.from_slowfast(DATA / "rev_mvit_b_16x4.yaml")
    assert caught[0].filename == __file__
    assert config.patch_kernel == (3, 7, 7)
    assert config.buffer_layers == (1, 3, 14)
    assert (config.sep_pos_embed, config.qkv_bias, config.droppath_rate) == (True, False, 0.05)


def test_options_replace_those_of_the_file() -> None:
    options: dict[str, Any] = {"depth": 2, "mode": "stored", "norm": "batchnorm"}
    with torch.device("meta"):
        read = RevMViT.from_config(
            DATA / "rev_vit_s.yaml", drop_path_mode="whole", num_classes=7, **options
        )
    assert read.head.projection.weight.shape == (7, 768)
    assert read.config.drop_path_mode == "whole"
    assert read.config.depth == 2
    assert read.rev_backbone.mode == "stored"
    assert "norm.running_mean" in read.state_dict()


def test_all_kinds_of_configs_are_read_alike() -> None:
    from omegaconf import OmegaConf
    from yacs.config import CfgNode

    cfg = tree()
    expected = RevMViTConfig.from_slowfast(cfg)
    for node in (CfgNode(cfg), OmegaConf.create(cfg)):
        found = RevMViTConfig.from_slowfast(node)
        assert found == expected
        assert hash(found) == hash(expected)  # no list is left in it
    assert RevMViTConfig.from_slowfast(expected, num_classes=2).num_classes == 2


def test_reversible_mvit_fits_into_another_model() -> None:
    """The original's signature: a config, and the surrounding module."""
    cfg = tree()
    backbone = ReversibleMViT(cfg, torch.nn.Module())
    assert backbone(torch.randn(2, 64, 16)).shape == (2, 4, 128)
    whole = RevMViT(cfg).state_dict()  # as SlowFast's model takes its config
    prefixed = {f"rev_backbone.{name}" for name in backbone.state_dict()}
    assert prefixed == {name for name in whole if name.startswith("rev_backbone")}


def test_the_last_layer_drops_paths_at_the_whole_rate() -> None:
    """The rates of the layers rise in equal steps from 0."""
    sizes = layer_sizes(RevMViTConfig.from_slowfast(tree(DROPPATH_RATE=0.4)))
    rates = [layer.drop_path for layer in sizes]
    assert len(rates) > 2
    assert rates == pytest.approx(torch.linspace(0, 0.4, len(rates)).tolist())


@pytest.mark.parametrize(
    "options",
    [
        # An even kernel, and a grid that its stride does not divide.
        {"pool_kvq_kernel": None, "pool_q_stride": ((1, 1, 3, 3), (3, 1, 2, 2))},
        # Transitions may be first, last and neighbours: a single stream stands for both.
        {"buffer_layers": (0, 1, 3, 4)},
    ],
)
def test_strides_and_transitions_fit(options: dict[str, Any]) -> None:
    model = RevMViT(RevMViTConfig(**{**SMALL, **options}))
    model(torch.randn(2, 3, 36, 36)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"buffer_layers": (3,)}, r"`buffer_layers` must include .* got \[3\], but layer 1"),
        ({"buffer_layers": ()}, r"`buffer_layers` must include .* got \[\], but layer 1"),
        ({"pool_q_stride": ((1, 1, 2, 2), (3, 1, 2, 2), (4, 1, 2, 2))}, r"but layer 4 changes"),
        ({"buffer_layers": (7,)}, r"`buffer_layers` must name layers from 0 to 4: got 7"),
        ({"pool_q_stride": ((9, 1, 2, 2),)}, r"`pool_q_stride` must .* from 0 to 4: got 9"),
        ({"pool_q_stride": ((1, 2, 2),)}, r"`pool_q_stride` must list \(layer, T, H, W\): got"),
        ({"dim_mul": ((1, 2, 3),)}, r"`dim_mul` must list \(layer, factor\): got"),
        ({"num_heads": 2, "head_mul": ((2, 1.5),)},
         r"`num_heads` must divide the width of each layer: got 2 heads and widths 16 and 33 in"),
        ({"pre_q_fusion": "linear"}, r"`pre_q_fusion` must be 'add', .*: got 'linear'"),
        ({"respath_fuse": "concat_linear_a"}, r"`respath_fuse` must be .*: got 'concat_linear_a'"),
        ({"pre_q_fusion": "concat_linear_1.2.3"}, "must be 'add', .*: got 'concat_linear_1.2.3'"),
        ({"patch_kernel": (3, 7, 7)}, r"`patch_kernel` must hold 2 numbers with patch_2d=True"),
        ({"pool_kvq_kernel": (3, 3)},
         r"`pool_kvq_kernel` must hold three numbers, \(T, H, W\): got"),
        ({"patch_kernel": 7}, r"`patch_kernel` must be a sequence: got 7\."),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RevMViT(RevMViTConfig(**{**SMALL, **options}))


@pytest.mark.parametrize(
    "cfg, message",
    [
        (tree(REV={"ENABLE": False}), r"`cfg.MVIT.REV.ENABLE` must be True: got False; other"),
        ({"MODEL": {"NUM_CLASSES": 4}}, r"`cfg.MVIT.REV.ENABLE` must be True: got False"),
        (
            tree(REV={"ENABLE": True, "RES_PATH": "max"}),
            r"`cfg.MVIT.REV.RES_PATH` must be 'conv': got 'max'; SlowFast's own",
        ),
        (tree(EMBED_DIMS=32), r"`cfg` has unknown MVIT keys: MVIT.EMBED_DIMS"),
        ({**tree(), "DETECTION": {"ENABLE": True}}, r"`cfg.DETECTION.ENABLE` must be False"),
        (tree(NORM=torch.nn.BatchNorm1d), r"a function .*: got <class '.*BatchNorm1d'>\. Pass"),
        (tree(NORM="batch"), r"`norm` must be one of 'layernorm', .* got 'batch'"),
    ],
)
def test_configs_that_do_not_fit_are_refused(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RevMViT.from_config(cfg)


def test_input_channels_are_a_number_or_a_list_of_one_for_each_pathway() -> None:
    for channels in (4, [4], [4, 2]):
        cfg = {**tree(), "DATA": {"INPUT_CHANNEL_NUM": channels}}
        assert RevMViTConfig.from_slowfast(cfg).in_channels == 4
