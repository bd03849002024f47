"""A user's model in each framework: what the comparison of two reads, and sets."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from multibn.communicators import Communicator
from multibn.options import NormOptions
from multibn.parity.oracle import Array
from multibn.parity.worker import Arrays, Chainer, Torch

Options = dict[str, object]


class TorchModel(Torch):
    title, classes = "torch", ("torch.nn", "Module")

    def norms(self) -> Iterator[Any]:
        return iter(self.module.modules())

    def synchronize(self, communicator: Communicator) -> None:
        from multibn.torch_backend import convert_sync_batchnorm

        self.module = self.call = convert_sync_batchnorm(self.module, communicator)

    def options(self) -> Iterator[tuple[str, Options]]:
        """Yield the options of each layer that has an eps, by the layer's name."""
        for name, layer in self.module.named_modules():
            of_norm: tuple[Any, ...] = ()
            if hasattr(layer, "running_var"):
                convention = getattr(layer, "running_var_convention", "unbiased_global")
                of_norm = layer.momentum, layer.weight, layer.bias, convention
            if hasattr(layer, "eps"):
                yield name, _options(vars(NormOptions.of(layer)), *of_norm)

    def load(self, state: Mapping[str, Array]) -> None:
        import torch

        self.module.load_state_dict({name: torch.tensor(a) for name, a in state.items()})

    @contextmanager
    def outputs(self) -> Iterator[Arrays]:
        """Record the output of each layer's first call, by the layer's name."""
        found: Arrays = {}

        def record(name: str) -> Callable[[Any, Any, Any], None]:
            def hook(_layer: Any, _args: Any, y: Any) -> None:
                if hasattr(y, "detach"):
                    found.setdefault(name, y.detach().numpy().copy())

            return hook

        named = [(name, layer) for name, layer in self.module.named_modules() if name]
        hooks = [layer.register_forward_hook(record(name)) for name, layer in named]
        yield found
        for hook in hooks:
            hook.remove()


class ChainerModel(Chainer):
    title, classes = "Chainer", ("chainer", "Link")

    def norms(self) -> Iterator[Any]:
        return iter(self.link.links())

    def synchronize(self, communicator: Communicator) -> None:
        from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model

        # isort: split
        from chainer import links as L

        links = list(self.link.links())
        is_plain = not any(isinstance(link, MultiNodeBatchNormalization) for link in links)
        if is_plain or any(isinstance(link, L.BatchNormalization) for link in links):
            self.link = self.call = create_mnbn_model(self.link, communicator)

    def options(self) -> Iterator[tuple[str, Options]]:
        for path, link in self.link.namedlinks():
            of_norm: tuple[Any, ...] = ()
            if hasattr(link, "avg_var") and hasattr(link, "decay"):
                convention = getattr(link, "avg_var_convention", "unbiased_global")
                of_norm = round(1 - link.decay, 12), link.gamma, link.beta, convention
            if hasattr(link, "eps"):
                yield _dotted(path), _options(vars(NormOptions.of(link)), *of_norm)

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

        found: Arrays = {}
        names = {id(link): _dotted(path) for path, link in self.link.namedlinks()}

        class Recorder(LinkHook):
            def forward_postprocess(self, args: Any) -> None:
                if hasattr(args.out, "array"):
                    found.setdefault(names.get(id(args.link), ""), args.out.array.copy())

        with Recorder():
            yield found


class FlaxModel:
    """A model of flax.nnx, in one process: its layers share with no other."""

    title, classes = "flax", ("flax.nnx", "Module")

    def __init__(self, model: Any) -> None:
        self.model = model

    def norms(self) -> Iterator[Any]:
        return iter(())

    def synchronize(self, communicator: Communicator) -> None:
        """Do nothing: ranks know the model's arrays, as it has run on the whole input."""

    def options(self) -> Iterator[tuple[str, Options]]:
        for name, layer in self._layers():
            of_norm: tuple[Any, ...] = ()
            if hasattr(layer, "momentum"):
                convention = getattr(layer, "running_var", "biased")
                of_norm = round(1 - layer.momentum, 12), layer.scale, layer.bias, convention
            if hasattr(layer, "epsilon"):
                weighting = getattr(layer, "weighting", "element")
                yield name, _options({"eps": layer.epsilon, "weighting": weighting}, *of_norm)

    def _layers(self) -> Iterator[tuple[str, Any]]:
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

        classes = [(m, type(m), name) for name, m in self._layers() if name and callable(m)]
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


def _options(shared: Options, *of_norm: Any) -> Options:
    """Return a layer's options under names that all frameworks share."""
    options = {k: v for k, v in shared.items() if k != "fuse_relu"}  # the other may have a ReLU
    if of_norm:
        options["momentum (1 - decay)"], weight, bias, convention = of_norm
        options["affine (gamma)"], options["bias (beta)"] = weight is not None, bias is not None
        options["running_var (avg_var)"] = convention
    return options


def _dotted(path: str) -> str:
    return path[1:].replace("/", ".")
