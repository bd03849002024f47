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


def resnet18() -> dict[str, Layer]:
    layers = {"stem.conv": Layer("conv", 3, 8, 3), "stem.bn": Layer("bn", 8, 8)}
    n_in = 8
    for stage in range(4):
        n_out = 8 * 2**stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            name = f"layer{stage}_{block}"
            layers[f"{name}.conv1"] = Layer("conv", n_in, n_out, 3, stride)
            layers[f"{name}.conv2"] = Layer("conv", n_out, n_out)
            layers |= {f"{name}.bn{i}": Layer("bn", n_out, n_out) for i in (1, 2)}
            if stride > 1:
                layers[f"{name}.down"] = Layer("conv", n_in, n_out, 1, stride)
                layers[f"{name}.down_bn"] = Layer("bn", n_out, n_out)
            n_in = n_out
    return layers | {"head.fc": Layer("linear", n_in, 10)}


def unet() -> dict[str, Layer]:
    return {
        "down.conv": Layer("conv", 3, 8), "down.bn": Layer("bn", 8, 8),
        "middle.conv": Layer("conv", 8, 16), "middle.bn": Layer("bn", 16, 16),
        "up.deconv": Layer("deconv", 16, 8, 2, 2), "up.bn": Layer("bn", 8, 8),
        "out.conv": Layer("conv", 16, 2),
    }  # fmt: skip


NETWORKS = {"resnet18": resnet18, "unet": unet}


class Framework:
    """What a network does beside its layers, on activations in the framework's layout."""

    def run(self, network: str, x: Any) -> Any:
        """The output for images (N, C, H, W)."""
        relu, call = self.relu, self.call
        if network == "unet":
            first = relu(call("down.bn", call("down.conv", x)))
            x = relu(call("middle.bn", call("middle.conv", self.pool(first))))
            x = relu(call("up.bn", call("up.deconv", x)))
            return call("out.conv", self.concat(x, first))
        x = relu(call("stem.bn", call("stem.conv", x)))
        for name in dict.fromkeys(n.split(".")[0] for n in resnet18() if n.startswith("layer")):
            short = x
            if f"{name}.down" in resnet18():
                short = call(f"{name}.down_bn", call(f"{name}.down", x))
            x = relu(call(f"{name}.bn1", call(f"{name}.conv1", x)))
            x = relu(call(f"{name}.bn2", call(f"{name}.conv2", x)) + short)
        return call("head.fc", self.mean(x))

    relu: Any
    pool: Any
    concat: Any
    mean: Any

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.blocks: dict[str, dict[str, Any]] = {}
        for name, layer in layers.items():
            block, _, leaf = name.partition(".")
            self.blocks.setdefault(block, {})[leaf] = getattr(self, layer.kind)(layer)

    def call(self, name: str, x: Any) -> Any:
        block, _, leaf = name.partition(".")
        return self.blocks[block][leaf](x)


class Torch(Framework):
    suffix = ".pt"
    relu = staticmethod(TF.relu)
    pool = staticmethod(lambda x: TF.max_pool2d(x, 2))
    concat = staticmethod(lambda x, y: torch.cat([x, y], 1))
    mean = staticmethod(lambda x: x.mean((2, 3)))

    conv = staticmethod(lambda v: nn.Conv2d(v.n_in, v.n_out, v.size, v.stride, v.size // 2))
    deconv = staticmethod(lambda v: nn.ConvTranspose2d(v.n_in, v.n_out, v.size, v.stride))
    bn = staticmethod(lambda v: nn.BatchNorm2d(v.n_out, eps=EPS))
    linear = staticmethod(lambda v: nn.Linear(v.n_in, v.n_out))

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__(layers)
        self.model = nn.ModuleDict({k: nn.ModuleDict(v) for k, v in self.blocks.items()}).eval()

    def load(self, path: Path) -> None:
        self.model.load_state_dict(torch.load(path))

    def output(self, network: str, images: Any) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return np.asarray(self.run(network, torch.from_numpy(images)))


class Chainer(Framework):
    suffix = ".npz"
    relu = staticmethod(CF.relu)
    pool = staticmethod(lambda x: CF.max_pooling_2d(x, 2))
    concat = staticmethod(lambda x, y: CF.concat([x, y], 1))
    mean = staticmethod(lambda x: CF.mean(x, (2, 3)))

    conv = staticmethod(lambda v: L.Convolution2D(v.n_in, v.n_out, v.size, v.stride, v.size // 2))
    deconv = staticmethod(lambda v: L.Deconvolution2D(v.n_in, v.n_out, v.size, v.stride))
    bn = staticmethod(lambda v: L.BatchNormalization(v.n_out, eps=EPS))
    linear = staticmethod(lambda v: L.Linear(v.n_in, v.n_out))

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__(layers)
        chains = {name: chainer.Chain(**block) for name, block in self.blocks.items()}
        self.model = chainer.Chain(**chains)

    def load(self, path: Path) -> None:
        chainer.serializers.load_npz(path, self.model)

    def output(self, network: str, images: Any) -> np.ndarray[Any, Any]:
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return np.asarray(self.run(network, images).array)


class Flax(Framework):
    suffix = ".msgpack"
    relu = staticmethod(jax.nn.relu)
    pool = staticmethod(lambda x: linen.max_pool(x, (2, 2), (2, 2)))
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

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__(layers)
        self.model = nnx.Dict({name: nnx.Dict(block) for name, block in self.blocks.items()})

    def load(self, path: Path) -> None:
        variables = serialization.msgpack_restore(path.read_bytes())
        assert set(variables) == {"params", "batch_stats"}
        for collection in variables.values():
            nnx.update(self.model, collection)

    def output(self, network: str, images: Any) -> np.ndarray[Any, Any]:
        y = np.asarray(jax.jit(lambda x: self.run(network, x))(images.transpose(0, 2, 3, 1)))
        return y.transpose(0, 3, 1, 2) if y.ndim == 4 else y


FRAMEWORKS: Any = {"torch": Torch, "chainer": Chainer, "flax": Flax}


def random_state(layers: dict[str, Layer]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = Torch(layers).model.state_dict()
    for key, value in state.items():
        if value.is_floating_point():
            state[key] = (
                torch.rand_like(value) + 0.5 if "var" in key else torch.randn_like(value) / 4
            )
    return state


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: Any, tmp_path_factory: Any) -> tuple[str, dict[str, Path]]:
    """A network's name, and its state in a file of each framework, translated from torch's."""
    folder = tmp_path_factory.mktemp(request.param)
    paths = {name: folder / f"a{kind.suffix}" for name, kind in FRAMEWORKS.items()}
    torch.save(random_state(NETWORKS[request.param]()), paths["torch"])
    for name in ("chainer", "flax"):
        convert(paths["torch"], paths[name])
    return request.param, paths


def test_a_network_evaluates_alike_in_every_framework(network: tuple[str, Any]) -> None:
    images = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype("float32")
    outputs = {}
    for name, path in network[1].items():
        framework = FRAMEWORKS[name](NETWORKS[network[0]]())
        framework.load(path)
        outputs[name] = framework.output(network[0], images)
    scale = np.abs(outputs["torch"]).max()
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["torch"], atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("source, target", [*permutations(FRAMEWORKS, 2)])
def test_each_pair_converts_and_back_bit_for_bit(
    network: tuple[str, Any], source: str, target: str, tmp_path: Path
) -> None:
    name, paths = network
    transposed = ["up.deconv"] if name == "unet" and "flax" in (source, target) else []
    there, back = (tmp_path / f"b{FRAMEWORKS[name].suffix}" for name in (target, source))
    separator = "/" if source == "chainer" else "."
    convert(paths[source], there, transposed=[v.replace(".", separator) for v in transposed])
    assert there.read_bytes() == paths[target].read_bytes() or target != "flax"
    separator = "/" if target == "chainer" else "."
    convert(there, back, transposed=[v.replace(".", separator) for v in transposed])
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


def test_safetensors_of_flax_begin_with_the_collection(tmp_path: Path) -> None:
    torch.save(random_state(unet()), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", target="flax")
    from safetensors.numpy import load_file

    keys = load_file(tmp_path / "a.safetensors").keys()
    assert {"params.down.conv.kernel", "batch_stats.down.bn.mean"} <= keys
    convert(tmp_path / "a.safetensors", tmp_path / "a.msgpack", source="flax")
    convert(tmp_path / "a.pt", tmp_path / "b.msgpack")
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()


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


def test_what_no_file_shows_is_noted(tmp_path: Path) -> None:
    torch.save(random_state(unet()), tmp_path / "a.pt")
    notes = " ".join(convert(tmp_path / "a.pt", tmp_path / "a.msgpack").notes)
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
def test_what_has_no_counterpart_is_named(
    tree: Any, options: Any, message: str, tmp_path: Path
) -> None:
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
