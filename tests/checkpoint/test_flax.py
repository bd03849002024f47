"""Checkpoints of flax: the same network in three frameworks, from one description."""

from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as TF

import multibn.chainer  # noqa: F401

# isort: split
import chainer
import jax
import jax.numpy as jnp
from chainer import functions as CF
from chainer import links as L
from flax import linen, nnx, serialization

from multibn.checkpoint import CheckpointError, convert
from tests.checkpoint.test_checkpoint import assert_same_bits

NEEDS = "torch chainer flax"
EPS = 1e-5


class Layer(NamedTuple):
    kind: str
    n_in: int
    n_out: int
    size: int = 3
    stride: int = 1


# A convolution with a stride, one that is transposed, and a skip connection between them.
LAYERS = {
    "down.conv": Layer("conv", 3, 8), "down.bn": Layer("bn", 8, 8),
    "middle.conv": Layer("conv", 8, 16, 3, 2), "middle.bn": Layer("bn", 16, 16),
    "up.deconv": Layer("deconv", 16, 8, 2, 2), "up.bn": Layer("bn", 8, 8),
    "head.fc": Layer("linear", 16, 10),
}  # fmt: skip


class Framework:
    """What the network does beside its layers, on activations in the framework's layout."""

    relu: Any
    concat: Any
    mean: Any

    def __init__(self) -> None:
        self.blocks: dict[str, dict[str, Any]] = {}
        for name, layer in LAYERS.items():
            block, _, leaf = name.partition(".")
            self.blocks.setdefault(block, {})[leaf] = getattr(self, layer.kind)(layer)

    def run(self, x: Any) -> Any:
        """The output for images (N, C, H, W)."""
        first = self.call("down.bn", self.call("down.conv", x))
        x = self.call("middle.bn", self.call("middle.conv", self.relu(first)))
        x = self.call("up.bn", self.call("up.deconv", self.relu(x)))
        return self.call("head.fc", self.mean(self.concat(self.relu(x), first)))

    def call(self, name: str, x: Any) -> Any:
        block, _, leaf = name.partition(".")
        return self.blocks[block][leaf](x)


class Torch(Framework):
    suffix = ".pt"
    relu = staticmethod(TF.relu)
    concat = staticmethod(lambda x, y: torch.cat([x, y], 1))
    mean = staticmethod(lambda x: x.mean((2, 3)))

    conv = staticmethod(lambda v: nn.Conv2d(v.n_in, v.n_out, v.size, v.stride, v.size // 2))
    deconv = staticmethod(lambda v: nn.ConvTranspose2d(v.n_in, v.n_out, v.size, v.stride))
    bn = staticmethod(lambda v: nn.BatchNorm2d(v.n_out, eps=EPS))
    linear = staticmethod(lambda v: nn.Linear(v.n_in, v.n_out))

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({k: nn.ModuleDict(v) for k, v in self.blocks.items()}).eval()

    def load(self, path: Path) -> None:
        self.model.load_state_dict(torch.load(path))

    def output(self, images: Any) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return np.asarray(self.run(torch.from_numpy(images)))


class Chainer(Framework):
    suffix = ".npz"
    relu = staticmethod(CF.relu)
    concat = staticmethod(lambda x, y: CF.concat([x, y], 1))
    mean = staticmethod(lambda x: CF.mean(x, (2, 3)))

    conv = staticmethod(lambda v: L.Convolution2D(v.n_in, v.n_out, v.size, v.stride, v.size // 2))
    deconv = staticmethod(lambda v: L.Deconvolution2D(v.n_in, v.n_out, v.size, v.stride))
    bn = staticmethod(lambda v: L.BatchNormalization(v.n_out, eps=EPS))
    linear = staticmethod(lambda v: L.Linear(v.n_in, v.n_out))

    def __init__(self) -> None:
        super().__init__()
        chains = {name: chainer.Chain(**block) for name, block in self.blocks.items()}
        self.model = chainer.Chain(**chains)

    def load(self, path: Path) -> None:
        chainer.serializers.load_npz(path, self.model)

    def output(self, images: Any) -> np.ndarray[Any, Any]:
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return np.asarray(self.run(images).array)


class Flax(Framework):
    suffix = ".msgpack"
    relu = staticmethod(jax.nn.relu)
    concat = staticmethod(lambda x, y: jnp.concatenate([x, y], -1))
    mean = staticmethod(lambda x: x.mean((1, 2)))

    some: Any = {"rngs": nnx.Rngs(0), "kernel_init": nnx.initializers.zeros}  # is loaded

    def conv(self, v: Layer) -> Any:
        given: Any = {"strides": v.stride, "padding": v.size // 2, **self.some}
        return nnx.Conv(v.n_in, v.n_out, (v.size, v.size), **given)

    def deconv(self, v: Layer) -> Any:
        given: Any = {"strides": (v.stride, v.stride), "padding": "VALID", **self.some}
        return nnx.ConvTranspose(v.n_in, v.n_out, (v.size, v.size), **given)

    def bn(self, v: Layer) -> Any:
        return nnx.BatchNorm(v.n_out, use_running_average=True, epsilon=EPS, rngs=nnx.Rngs(0))

    def linear(self, v: Layer) -> Any:
        return nnx.Linear(v.n_in, v.n_out, **self.some)

    def __init__(self) -> None:
        super().__init__()
        self.model = nnx.Dict({name: nnx.Dict(block) for name, block in self.blocks.items()})

    def load(self, path: Path) -> None:
        variables = serialization.msgpack_restore(path.read_bytes())
        assert set(variables) == {"params", "batch_stats"}
        for collection in variables.values():
            nnx.update(self.model, collection)

    def output(self, images: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.run(images.transpose(0, 2, 3, 1)))


FRAMEWORKS: Any = {"torch": Torch, "chainer": Chainer, "flax": Flax}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> dict[str, Path]:
    """The network's state in a file of each framework, translated from torch's."""
    folder = tmp_path_factory.mktemp("network")
    paths = {name: folder / f"a{kind.suffix}" for name, kind in FRAMEWORKS.items()}
    torch.manual_seed(0)
    state = Torch().model.state_dict()
    for key, value in state.items():
        if value.is_floating_point():
            state[key] = torch.rand_like(value) + 0.5 if "var" in key else torch.randn_like(value)
    torch.save(state, paths["torch"])
    for name in ("chainer", "flax"):
        convert(paths["torch"], paths[name])
    return paths


def test_a_network_evaluates_alike_in_every_framework(paths: dict[str, Path]) -> None:
    images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype("float32")
    outputs = {}
    for name, path in paths.items():
        framework = FRAMEWORKS[name]()
        framework.load(path)
        outputs[name] = framework.output(images)
    scale = np.abs(outputs["torch"]).max()
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["torch"], atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("source, target", [*permutations(FRAMEWORKS, 2)])
def test_pairs_convert_bit_for_bit(paths: Any, source: str, target: str, tmp_path: Path) -> None:
    there, back = (tmp_path / f"b{FRAMEWORKS[name].suffix}" for name in (target, source))
    transposed = {
        name: ["up/deconv" if name == "chainer" else "up.deconv"] * ("flax" in (source, target))
        for name in (source, target)
    }
    convert(paths[source], there, transposed=transposed[source])
    assert there.read_bytes() == paths[target].read_bytes() or target != "flax"
    convert(there, back, transposed=transposed[target])
    assert_same_bits(_arrays(back), _arrays(paths[source]))


def _arrays(path: Path) -> dict[str, Any]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    if path.suffix == ".pt":
        return {key: value.numpy() for key, value in torch.load(path).items()}
    leaves = jax.tree_util.tree_leaves_with_path(serialization.msgpack_restore(path.read_bytes()))
    return {jax.tree_util.keystr(key): value for key, value in leaves}


def _save(path: Path, tree: Any) -> Path:
    path.write_bytes(serialization.to_bytes(tree))
    return path


def test_variables_of_linen_and_pure_states_of_nnx_are_read(tmp_path: Path) -> None:
    norm = linen.BatchNorm(use_running_average=True)
    variables = norm.init(jax.random.key(0), jnp.zeros((1, 3)))
    convert(_save(tmp_path / "a.msgpack", variables), tmp_path / "a.pt")
    nn.BatchNorm1d(3).load_state_dict(torch.load(tmp_path / "a.pt"))
    model: Any = nnx.Module()
    model.layers = nnx.List([nnx.Embed(5, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0))])
    pure = nnx.to_pure_dict(nnx.state(model))
    converted = convert(_save(tmp_path / "b.msgpack", pure), tmp_path / "b.pt")
    assert list(converted.state) == ["layers.0.weight", "layers.1.bias", "layers.1.weight"]
    assert converted.state["layers.0.weight"].shape == (5, 3)


def test_an_embedding_is_named_and_keeps_its_layout(tmp_path: Path) -> None:
    torch.save(nn.Embedding(5, 3).state_dict(), tmp_path / "a.pt")
    names = {"weight": "embed.embedding"}
    state = convert(tmp_path / "a.pt", tmp_path / "a.msgpack", names=names).state
    assert state["embed.embedding"].shape == (5, 3)


def test_safetensors_of_flax_begin_with_the_collection(paths: Any, tmp_path: Path) -> None:
    convert(paths["torch"], tmp_path / "a.safetensors", target="flax")
    from safetensors.numpy import load_file

    keys = load_file(tmp_path / "a.safetensors").keys()
    assert {"params.down.conv.kernel", "batch_stats.down.bn.mean"} <= keys
    convert(tmp_path / "a.safetensors", tmp_path / "a.msgpack", source="flax")
    assert (tmp_path / "a.msgpack").read_bytes() == paths["flax"].read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_a_count_changes_the_convention_of_variances(suffix: str, tmp_path: Path) -> None:
    torch.save({**nn.BatchNorm1d(3).state_dict()}, tmp_path / "a.pt")
    first = tmp_path / f"a{suffix}"
    if suffix != ".pt":
        convert(tmp_path / "a.pt", first)
    biased = convert(first, tmp_path / "a.msgpack", count=5).state["var"]
    np.testing.assert_allclose(biased, 0.8)
    back = convert(tmp_path / "a.msgpack", tmp_path / f"b{suffix}", count=5).state
    np.testing.assert_allclose(back["running_var" if suffix == ".pt" else "avg_var"], 1)


def test_what_no_file_shows_is_noted(paths: Any, tmp_path: Path) -> None:
    notes = " ".join(convert(paths["torch"], tmp_path / "a.msgpack").notes)
    for words in ("eps and momentum", "1 - the momentum of Keras", "permute the rows of the Dense",
                  "running variance is biased", "in `transposed`"):  # fmt: skip
        assert words in notes


@pytest.mark.parametrize(
    "tree, options, message",
    [
        ({"params": {"w": {"kernel": np.ones((2, 2))}}, "opt_state": {"0": np.ones(1)}}, {},
         "contains 'opt_state' in addition to the model's variables: the state of an optimizer"),
        ({"params": {"w": {"kernel": np.ones((2, 2))}}}, {"transposed": ["up"]},
         "every entry of `transposed` must be the name of a layer: no array belongs to 'up'"),
        ({"params": {"w": {"log_scale": np.ones(2)}}}, {}, "no name in torch is known for"),
    ],
)  # fmt: skip
def test_what_has_no_peer_is_named(tree: Any, options: Any, message: str, tmp_path: Path) -> None:
    path = _save(tmp_path / "a.msgpack", tree)
    with pytest.raises(CheckpointError, match=message):
        convert(path, tmp_path / "a.pt", **options)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    torch.save(nn.BatchNorm1d(3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"of a \.pt file must be torch: got 'flax'"):
        convert(tmp_path / "a.pt", tmp_path / "a.msgpack", source="flax")
    with pytest.raises(CheckpointError, match=r"the suffix must be one of .*: got '\.txt'"):
        convert(tmp_path / "a.pt", tmp_path / "a.txt", target="flax")
    with pytest.raises(ValueError, match=r"`count` must be in .1, inf.: got 1"):
        convert(tmp_path / "a.pt", tmp_path / "a.msgpack", count=1)
