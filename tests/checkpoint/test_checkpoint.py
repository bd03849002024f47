"""Checkpoints: names, layouts, what is said, and what is refused."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import launch

pytest.importorskip("safetensors")

import torch
from torch import nn

import multibn.chainer_backend as mbc

# isort: split
import chainer
from chainer import functions as F
from chainer import links as L

import multibn.torch_backend as mbt
from multibn import SingleProcess
from multibn.checkpoint import CheckpointError, chainer_to_torch, convert, torch_to_chainer
from tests.checkpoint.test_files import make

NEEDS = "torch chainer"

DTYPES = ["float16", "float32", "float64"]
SUFFIXES = [".pt", ".pth", ".safetensors"]


class Predictor(chainer.Chain):
    """Every kind of link whose layout is the same in torch."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        with chainer.using_config("dtype", np.dtype(dtype)), self.init_scope():
            self.embed = L.EmbedID(5, 3)
            self.conv = L.Convolution2D(3, 4, 3, groups=1)
            self.deconv = L.Deconvolution2D(4, 2, 2)
            self.bn = mbc.MultiNodeBatchNormalization(4, SingleProcess())
            self.blocks = chainer.Sequential(
                L.BatchNormalization(2),
                F.relu,
                L.Linear(2, 6),
                L.BatchNormalization(6, use_beta=False),
            )


def test_the_guide_names_the_links_of_a_sequential() -> None:
    """A Sequential numbers its links in an order of its own."""
    text = (launch.ROOT / "docs/guides/from-chainermn-to-torch.md").read_text()
    code = textwrap.dedent(text.split("```python\n", 1)[1].split("```")[0])
    scope: dict[str, Any] = {"model": Predictor(), "chainer": chainer}
    exec(code, scope)
    right = {"blocks/0": "blocks.0", "blocks/2": "blocks.2", "blocks/1": "blocks.3"}
    assert scope["names"] == right


def chainer_arrays(dtype: str = "float32") -> dict[str, Any]:
    """What save_npz writes, with random values everywhere."""
    model = L.Classifier(Predictor(dtype))
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    rng = np.random.default_rng(0)
    return {
        key: np.asarray(value)
        if key.endswith("/N")
        else rng.normal(size=value.shape).astype(value.dtype)
        for key, value in serializer.target.items()
    }


def assert_same_bits(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, whichever library holds them."""
    assert got.keys() == expected.keys()
    for key in got:
        a, b = (np.asarray(side[key]) for side in (got, expected))
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), key


def check_note(converted: Any, text: str) -> None:
    assert any(text in note for note in converted.notes), converted.notes


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_comes_back_with_the_same_bits(dtype: str, suffix: str, tmp_path: Path) -> None:
    arrays = chainer_arrays(dtype)
    source = make(tmp_path / "model.npz", arrays)
    middle, back = tmp_path / f"model{suffix}", tmp_path / "back.npz"
    convert(source, middle, names={"predictor": ""})
    convert(middle, back, names={"": "predictor"})
    with np.load(back) as file:
        assert_same_bits(dict(file), arrays)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(3),
        nn.BatchNorm1d(3, affine=False),
        mbt.SyncBatchNorm(3, bias=False),
    ],
    ids=lambda layer: f"{type(layer).__name__} {'affine' if layer.affine else ''}",
)
@pytest.mark.parametrize("name", ["", "norm"])
def test_every_layer_comes_back_from_chainer_bit_for_bit(layer: nn.Module, name: str) -> None:
    model = nn.ModuleDict({name: layer}) if name else layer
    state = model.state_dict()
    there = torch_to_chainer(state)
    assert {key.rpartition("/")[2] for key in there.state} <= {
        "gamma", "beta", "avg_mean", "avg_var", "N",
    }  # fmt: skip
    assert_same_bits(chainer_to_torch(there.state).state, state)


def test_a_sub_batch_norm_keeps_the_population_statistics() -> None:
    layer = mbt.SubBatchNorm2d(2, 3)
    layer(torch.randn(4, 3, 5, 5))
    state = nn.ModuleDict({"bn": layer}).state_dict()
    there = torch_to_chainer(state, names={"bn.split_bn": None, "bn.bn": "bn"}).state
    assert there.keys() == {f"bn/{name}" for name in ("gamma", "beta", "avg_mean", "avg_var", "N")}
    back = chainer_to_torch(there, names={"bn": ""}).state
    other = mbt.SubBatchNorm2d(4, 3)
    other.load_state_dict({key: torch.from_numpy(value) for key, value in back.items()})
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(other.eval()(x), layer.eval()(x))


def test_notes_say_what_becomes_of_chainers_numbers() -> None:
    arrays = chainer_arrays()
    arrays["predictor/bn/N"] = np.asarray(12)
    converted = chainer_to_torch(arrays)
    check_note(converted, "set the eps and momentum of the source model in the target's layers: ")
    check_note(
        converted, "eps is 2e-5 in Chainer, 1e-3 in Keras, and 1e-5 in torch, flax and Paddle"
    )
    check_note(converted, "momentum is 1 - decay, and 1 - the momentum of Keras, flax and Paddle")
    check_note(converted, "running_var is copied unchanged, biased or unbiased")
    check_note(converted, "num_batches_tracked starts at 0")
    assert converted.state["predictor.bn.num_batches_tracked"] == 0


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_statistics_of_other_frameworks_carry_the_note(suffix: str, tmp_path: Path) -> None:
    """It is about running statistics that get their names, whatever these were called before."""
    old = "bn/moving_mean" if suffix == ".npz" else "bn.moving_mean"
    source = make(tmp_path / f"a{suffix}", {old: torch.zeros(2)})
    for target, new in ((".npz", "bn/avg_mean"), (".pt", "bn.running_mean")):
        converted = convert(source, tmp_path / f"b{target}", names={old: new})
        check_note(converted, "set the eps and momentum of the source model")
        renamed = new.replace("bn", "norm")
        same = convert(tmp_path / f"b{target}", tmp_path / f"c{target}", names={new: renamed})
        assert same.notes == ()


def test_numbers_are_carried_with_a_word() -> None:
    arrays = {"a/0/W": np.zeros((1, 1)), "a/1/0/W": np.zeros((1, 1)), "b/W": np.zeros((1, 1))}
    converted = chainer_to_torch(arrays)
    assert list(converted.state) == ["a.0.weight", "a.1.0.weight", "b.weight"]
    check_note(converted, "the numbers in 'a/0/W', 'a/1/0/W' are kept unchanged, which is")
    check_note(chainer_to_torch(arrays, names={"a": ""}), "the numbers in 'a/0/W', 'a/1/0/W'")
    assert not chainer_to_torch(arrays, names={"a/0": "x", "a/1": "y", "a/1/0": "z"}).notes
    check_note(torch_to_chainer(converted.state), "the numbers in 'a.0.weight', 'a.1.0.weight'")


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_the_prefix_of_a_wrapper_gets_a_note(wrapper: str) -> None:
    state = nn.ModuleDict({wrapper: nn.Linear(2, 3)}).state_dict()
    check_note(torch_to_chainer(state), f"start with '{wrapper}', the prefix of a wrapper: pass")
    assert not torch_to_chainer(state, names={wrapper: ""}).notes
    assert not torch_to_chainer(state | {"W": torch.zeros(1)}, names={"W": "a"}).notes


def test_nothing_is_said_without_batch_norm() -> None:
    assert torch_to_chainer(nn.Linear(2, 3).state_dict()).notes == ()


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    layer = nn.Linear(2, 3, dtype=torch.bfloat16)
    converted = torch_to_chainer(layer.state_dict())
    assert np.array_equal(converted.state["W"], layer.weight.detach().float().numpy())
    torch.save(layer.state_dict(), tmp_path / "a.pt")  # but stays itself within torch
    same = convert(tmp_path / "a.pt", tmp_path / "a.safetensors").state
    assert same["weight"].dtype is torch.bfloat16


def test_a_normalization_without_statistics_has_gamma_and_beta() -> None:
    converted = torch_to_chainer(nn.LayerNorm(3).state_dict())
    assert list(converted.state) == ["gamma", "beta"]
    for layer in (nn.PReLU(), nn.LayerNorm((3, 2))):
        with pytest.raises(CheckpointError, match="no name in chainer is known for 'weight'"):
            torch_to_chainer(layer.state_dict())


def test_names_replace_keys_and_prefixes_or_are_refused() -> None:
    arrays = {"a/b/W": np.zeros((1, 1)), "a/b/b": np.zeros(1), "a/c/W": np.zeros((2, 2))}
    assert list(chainer_to_torch(arrays).state) == ["a.b.weight", "a.b.bias", "a.c.weight"]
    for names, expected in (
        ({"a": "x.y"}, ["x.y.b.weight", "x.y.b.bias", "x.y.c.weight"]),
        ({"a": ""}, ["b.weight", "b.bias", "c.weight"]),
        ({"": "m"}, ["m.a.b.weight", "m.a.b.bias", "m.a.c.weight"]),
        ({"a": "x", "a/b": "y"}, ["y.weight", "y.bias", "x.c.weight"]),
        ({"a/b/W": "k", "a/b": "y"}, ["k", "y.bias", "a.c.weight"]),
        ({"a/b": None}, ["a.c.weight"]),
    ):
        converted = chainer_to_torch(arrays, names=names)
        assert list(converted.state) == expected
    for wrong, message in (
        ({"a/d": "x"}, r"match a key or a prefix: no key matches 'a/d'\. Correct or"),
        ({"a/b": "a/c", "a/c": "a/c"}, "'a/c/W' would become 'a/c.weight', as 'a/b/W' does"),
        ({"a/b/W": ""}, "'a/b/W' would become ''"),
        ({"a": None}, "no arrays are left to convert: `names` maps every key to None"),
        ({"a": 3}, r"`names` must map str to str or None: got \{'a': 3\}"),
        (["a"], r"`names` must map str to str or None: got \['a'\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            chainer_to_torch(arrays, names=wrong)  # type: ignore[arg-type]


def test_a_counter_that_is_named_is_carried() -> None:
    arrays = {"avg_mean": np.zeros(1), "avg_var": np.ones(1), "N": np.asarray(5)}
    assert chainer_to_torch(arrays, names={"N": "count"}).state["count"] == 5


def test_unknown_keys_are_refused_or_left_out() -> None:
    arrays = {"l/W": np.zeros((1, 1)), "l/V1": np.zeros(1), "V2": np.asarray(0)}
    told = r"no name in torch is known for 'l/V1', 'V2'\. Map them"
    with pytest.raises(CheckpointError, match=told):
        chainer_to_torch(arrays)
    names = {"l/V1": None, "V2": None}
    assert list(chainer_to_torch(arrays, names=names).state) == ["l.weight"]
    for count, message in ((8, r"'k4', 'k5' and 2 more\. Map"), (6, r"'k4', 'k5'\. Map")):
        with pytest.raises(CheckpointError, match=rf"for 'k0', 'k1', .* {message}"):
            chainer_to_torch({f"k{i}": np.zeros(1) for i in range(count)})
    with pytest.raises(CheckpointError, match="'weight_ih_l0', 'weight_hh_l0', 'bias_ih_l0'"):
        torch_to_chainer(nn.LSTM(2, 3).state_dict())
    with pytest.raises(CheckpointError, match="'/W' would become 'weight', as 'W' does"):
        chainer_to_torch({"W": np.zeros((1, 1)), "/W": np.zeros((1, 1))})
    with pytest.raises(CheckpointError, match=r"known for 'a/b\.weight'"):
        torch_to_chainer({"a/b.weight": torch.zeros(1, 1)})
