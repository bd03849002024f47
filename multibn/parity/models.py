"""A user's model in each framework: what the comparison of two reads, and sets."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from multibn.communicators import Communicator
from multibn.options import NormOptions
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Chainer, Torch


class _Model:
    """What is alike in all frameworks."""

    title: str
    classes: tuple[str, str]  # the framework's class of models: its module, its name
    # Attributes: eps; of batch norm also momentum, scale, shift, and the variance's convention.
    words: tuple[str, str, str, str, str]
    convention = "unbiased_global"  # of layers without that attribute
    has_decay = True  # where others have a momentum

    def layers(self) -> Iterable[tuple[str, Any]]:
        """All layers with their names, which have dots."""
        raise NotImplementedError

    def options(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield the options of each layer that has an eps, by the layer's name."""
        eps, momentum, scale, shift, convention = self.words
        for name, layer in self.layers():
            if not hasattr(layer, eps):
                continue
            shared = NormOptions.of(SimpleNamespace(eps=getattr(layer, eps)), layer)
            # The other model may have the ReLU behind the layer.
            options = {k: v for k, v in vars(shared).items() if k != "fuse_relu"}
            if hasattr(layer, momentum):
                value = getattr(layer, momentum)
                options["momentum (1 - decay)"] = round(1 - value, 12) if self.has_decay else value
                options["affine (gamma)"] = getattr(layer, scale) is not None
                options["bias (beta)"] = getattr(layer, shift) is not None
                options["running_var (avg_var)"] = getattr(layer, convention, self.convention)
            yield name, options

    def recorder(self) -> tuple[Arrays, Callable[[Any, Any], None]]:
        """Return a dict, and what keeps the output of a layer's first call there."""
        found: Arrays = {}
        names = {id(layer): name for name, layer in self.layers() if name}

        def keep(layer: Any, y: Any) -> None:
            if id(layer) in names and isinstance(y, np.ndarray):
                found.setdefault(names[id(layer)], y.copy())

        return found, keep


class TorchModel(Torch, _Model):
    title, classes, has_decay = "torch", ("torch.nn", "Module"), False
    words = "eps", "momentum", "weight", "bias", "running_var_convention"

    def layers(self) -> Iterable[tuple[str, Any]]:
        return self.module.named_modules()

    def synchronize(self, communicator: Communicator) -> None:
        from multibn.torch_backend import convert_sync_batchnorm

        self.module = self.call = convert_sync_batchnorm(self.module, communicator)

    def load(self, state: Mapping[str, Array]) -> None:
        import torch

        self.module.load_state_dict({name: torch.tensor(a) for name, a in state.items()})

    @contextmanager
    def outputs(self) -> Iterator[Arrays]:
        """Record the output of each layer's first call, by the layer's name."""
        found, keep = self.recorder()

        def hook(layer: Any, _: Any, y: Any) -> None:
            keep(layer, y.detach().numpy() if hasattr(y, "detach") else y)

        hooks = [layer.register_forward_hook(hook) for _, layer in self.layers()]
        yield found
        for each in hooks:
            each.remove()


class ChainerModel(Chainer, _Model):
    title, classes = "Chainer", ("chainer", "Link")
    words = "eps", "decay", "gamma", "beta", "avg_var_convention"

    def layers(self) -> Iterable[tuple[str, Any]]:
        return ((path[1:].replace("/", "."), link) for path, link in self.link.namedlinks())

    def synchronize(self, communicator: Communicator) -> None:
        from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model

        # isort: split
        from chainer import links as L

        links = list(self.link.links())
        is_plain = not any(isinstance(link, MultiNodeBatchNormalization) for link in links)
        if is_plain or any(isinstance(link, L.BatchNormalization) for link in links):
            self.link = self.call = create_mnbn_model(self.link, communicator)

    def state(self) -> Any:
        from chainer.serializers import DictionarySerializer

        serializer = DictionarySerializer()
        serializer.save(self.link)
        return serializer.target

    def load(self, state: Mapping[str, Array]) -> None:
        from chainer.serializers import NpzDeserializer

        NpzDeserializer(state).load(self.link)

    @contextmanager
    def outputs(self) -> Iterator[Arrays]:
        from chainer import LinkHook

        found, keep = self.recorder()

        class Recorder(LinkHook):
            def forward_postprocess(self, args: Any) -> None:
                keep(args.link, getattr(args.out, "array", None))

        with Recorder():
            yield found


class FlaxModel(_Model):
    """A model of flax.nnx, in one process: its layers share with no other."""

    title, classes, convention = "flax", ("flax.nnx", "Module"), "biased"
    words = "epsilon", "momentum", "scale", "bias", "running_var"

    def __init__(self, model: Any) -> None:
        self.model = model

    def synchronize(self, communicator: Communicator) -> None:
        """Do nothing: ranks know the model's arrays, as it has run on the whole input."""

    def layers(self) -> Iterable[tuple[str, Any]]:
        from flax import nnx

        return ((".".join(map(str, path)), m) for path, m in nnx.iter_modules(self.model))

    def state(self) -> Any:
        from flax import nnx

        flat = nnx.to_flat_state(nnx.state(self.model, nnx.Any(nnx.Param, nnx.BatchStat)))
        return {".".join(map(str, path)): np.asarray(v[...]) for path, v in flat}

    def train(self, x: Array) -> tuple[Array, Array]:
        """Train as `Torch.train`, after a pass without gradient, whose outputs can be read."""
        import jax
        from flax import nnx

        with jax.enable_x64(x.dtype == np.float64):
            self.model.train()
            graph, state = nnx.split(self.model)

            def run(x: Any) -> Any:
                model = nnx.merge(graph, state, copy=True)
                return model(x), nnx.state(model)

            run(jax.numpy.asarray(x))
            y, gradient, moved = jax.vjp(run, jax.numpy.asarray(x), has_aux=True)
            nnx.update(self.model, moved)
            return np.asarray(y), np.asarray(gradient(y**2)[0])

    def evaluate(self, x: Array) -> Array:
        import jax

        with jax.enable_x64(x.dtype == np.float64):
            self.model.eval()
            return np.asarray(self.model(jax.numpy.asarray(x)))

    @contextmanager
    def outputs(self) -> Iterator[Arrays]:
        import jax

        found: Arrays = {}

        def recording(cls: Any, name: str) -> Any:
            def call(self: Any, *args: Any, **options: Any) -> Any:
                y = cls.__call__(self, *args, **options)
                if isinstance(y, jax.Array) and not isinstance(y, jax.core.Tracer):
                    found.setdefault(name, np.asarray(y))
                return y

            return type(cls.__name__, (cls,), {"__call__": call})

        classes = [(m, type(m), name) for name, m in self.layers() if name and callable(m)]
        for m, cls, name in classes:
            m.__class__ = recording(cls, name)
        yield found
        for m, cls, _ in classes:
            m.__class__ = cls


Model = TorchModel | ChainerModel | FlaxModel
# In the order of a pair; the first model gets the state of the second.
KINDS: tuple[type[Model], ...] = TorchModel, ChainerModel, FlaxModel


def model_of(found: object) -> Model | None:
    """Return what compares this model; None for anything else. Imports no framework."""
    for kind in KINDS:
        module, name = kind.classes
        if isinstance(found, getattr(sys.modules.get(module), name, ())):
            return kind(found)
    return None
