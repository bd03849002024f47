"""Adapters for the comparison of two models: one interface to each framework's model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from multibn.communicators import Communicator
from multibn.options import NormOptions
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Chainer, Torch


class _Model:
    """What the adapters of all frameworks have in common."""

    title: str
    base_class: tuple[str, str]  # the framework's class of models: its module and its name
    # Attributes of layers: eps, momentum, scale, shift, convention of the running variance.
    attributes: tuple[str, str, str, str, str]
    convention = "unbiased_global"  # if a layer has no attribute for it
    has_decay = True  # the attribute for momentum stores 1 - momentum

    def layers(self) -> Iterable[tuple[str, Any]]:
        """Return (dotted name, layer) pairs."""
        raise NotImplementedError

    def options(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield (dotted name, options) for each layer that has an eps."""
        eps, momentum, scale, shift, convention = self.attributes
        for name, layer in self.layers():
            if not hasattr(layer, eps):
                continue
            shared = NormOptions.of(SimpleNamespace(eps=getattr(layer, eps)), layer)
            # The other model may have the ReLU as a layer of its own.
            options = {k: v for k, v in vars(shared).items() if k != "fuse_relu"}
            if hasattr(layer, momentum):
                value = getattr(layer, momentum)
                options["momentum (1 - decay)"] = round(1 - value, 12) if self.has_decay else value
                for option, attribute in (("affine (gamma)", scale), ("bias (beta)", shift)):
                    found = getattr(layer, attribute, None)
                    options[option] = found is not None and found is not False
                options["running_var (avg_var)"] = getattr(layer, convention, self.convention)
            yield name, options

    def recorder(self) -> tuple[Arrays, Callable[[Any, Any], None]]:
        """Return a dict, and a function that stores the output of a layer's first call in it."""
        recorded: Arrays = {}
        names = {id(layer): name for name, layer in self.layers() if name}

        def record(layer: Any, y: Any) -> None:
            y = getattr(y, "array", y.detach().numpy() if hasattr(y, "detach") else y)
            if id(layer) in names and isinstance(y, np.ndarray):
                recorded.setdefault(names[id(layer)], y.copy())

        return recorded, record


class TorchModel(Torch, _Model):
    title, base_class, has_decay = "torch", ("torch.nn", "Module"), False
    attributes = "eps", "momentum", "weight", "bias", "running_var_convention"

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
        recorded, record = self.recorder()
        hook: Any = lambda layer, _, y: record(layer, y)  # noqa: E731
        handles = [layer.register_forward_hook(hook) for _, layer in self.layers()]
        yield recorded
        for handle in handles:
            handle.remove()


class ChainerModel(Chainer, _Model):
    title, base_class = "Chainer", ("chainer", "Link")
    attributes = "eps", "decay", "gamma", "beta", "avg_var_convention"

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

        recorded, record = self.recorder()

        class Recorder(LinkHook):
            def forward_postprocess(self, args: Any) -> None:
                record(args.link, args.out)

        with Recorder():
            yield recorded


class FlaxModel(_Model):
    """A model of flax.nnx, which runs in one process only: its layers share no statistics."""

    title, base_class, convention = "flax", ("flax.nnx", "Module"), "biased"
    attributes = "epsilon", "momentum", "scale", "bias", "running_var"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.recorded: Arrays = {}

    def synchronize(self, communicator: Communicator) -> None:
        """Do nothing: a flax model is compared in one process only."""

    def layers(self) -> Iterable[tuple[str, Any]]:
        return _named_modules(self.model)

    def state(self) -> Any:
        from flax import nnx

        flat = nnx.to_flat_state(nnx.state(self.model, nnx.Any(nnx.Param, nnx.BatchStat)))
        return {".".join(map(str, path)): np.asarray(v[...]) for path, v in flat}

    def train(self, x: Array) -> tuple[Array, Array]:
        """Train as `Torch.train` does; first run once untraced, so that outputs can be recorded."""
        import jax
        from flax import nnx

        with jax.enable_x64(x.dtype == np.float64):
            self.model.train()
            graph, state = nnx.split(self.model)

            def run(x: Any, *, recording: bool = False) -> Any:
                model = nnx.merge(graph, state, copy=True)
                for name, layer in list(_named_modules(model)) if recording else ():
                    if name and callable(layer):
                        layer.__class__ = self.recording_class(type(layer), name)
                return self.call(model, x, train=True), nnx.state(model)

            run(jax.numpy.asarray(x), recording=True)
            y, backward, new_state = jax.vjp(run, jax.numpy.asarray(x), has_aux=True)
            nnx.update(self.model, new_state)
            return np.asarray(y), np.asarray(backward(y**2)[0])

    def evaluate(self, x: Array) -> Array:
        import jax

        with jax.enable_x64(x.dtype == np.float64):
            self.model.eval()
            return np.asarray(self.call(self.model, jax.numpy.asarray(x), train=False))

    def call(self, model: Any, x: Any, *, train: bool) -> Any:
        """Call `model`, this model or a copy of it, after `train()` or `eval()`."""
        return model(x)

    def outputs(self) -> AbstractContextManager[Arrays]:
        return nullcontext(self.recorded)

    def recording_class(self, cls: Any, name: str) -> Any:
        """Return a subclass of a layer's class, which records the output."""

        def call(layer: Any, *args: Any, **options: Any) -> Any:
            return self.record(name, cls.__call__(layer, *args, **options))

        return type(cls.__name__, (cls,), {"__call__": call})

    def record(self, name: str, y: Any) -> Any:
        """Store `y` if it is the output of a layer's first call and JAX does not trace it."""
        import jax

        if isinstance(y, jax.Array) and not isinstance(y, jax.core.Tracer):
            self.recorded.setdefault(name, np.asarray(y))
        return y


class LinenModel(FlaxModel):
    """A model of flax.linen, which is called with `train`; its first call finds the layers."""

    base_class = "flax.linen", "Module"
    attributes = "epsilon", "momentum", "use_scale", "use_bias", "running_var"

    def __init__(self, model: Any) -> None:
        from flax import nnx

        super().__init__(nnx.bridge.ToNNX(model, nnx.Rngs(0)))
        self.called: dict[str, Any] = {}

    def layers(self) -> Iterable[tuple[str, Any]]:
        return self.called.items()

    def call(self, model: Any, x: Any, *, train: bool) -> Any:
        from flax import linen

        def record(method: Any, args: Any, options: Any, context: Any) -> Any:
            layer, y = context.module, method(*args, **options)
            if context.method_name == "__call__":
                name = ".".join(layer.path)
                self.called[name] = layer
                if train:
                    self.record(name, y)
            return y

        if not self.called:
            model.lazy_init(x, train=train)
        with linen.intercept_methods(record):
            return model(x, train=train, mutable=["batch_stats"])


def _named_modules(model: Any) -> Iterable[tuple[str, Any]]:
    from flax import nnx

    return ((".".join(map(str, path)), layer) for path, layer in nnx.iter_modules(model))


Model = TorchModel | ChainerModel | FlaxModel
# Pairs of models must have this order. The first model of a pair gets the state of the second.
KINDS: tuple[type[Model], ...] = TorchModel, ChainerModel, FlaxModel, LinenModel


def model_of(value: object) -> Model | None:
    """Return the adapter of a user's model; None for anything else. Imports no framework."""
    for kind in KINDS:
        module, name = kind.base_class
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return kind(value)
    return None
