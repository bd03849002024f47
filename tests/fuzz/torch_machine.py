"""A state machine of torch's layers: what it has, and its training steps. See `machines`."""

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from multibn import torch_backend as tb
from multibn.communicators import Communicator
from tests.fuzz import machines
from tests.fuzz.calls import Array
from tests.fuzz.machines import Batches, Calls, Expected, flat, shape
from tests.fuzz.operations import Operations
from tests.fuzz.oracle import F64, Buffers, Norm
from tests.torch_backend.steps import checkpointed, saved

BUILT = {
    "SyncBatchNorm": (tb.SyncBatchNorm, (3, 4, 5)),
    "SyncBatchNorm1d": (tb.SyncBatchNorm1d, (3,)),
    "SyncBatchNorm2d": (tb.SyncBatchNorm2d, (4,)),
    "SyncBatchNorm3d": (tb.SyncBatchNorm3d, (5,)),
}
PLAIN = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SUB = {3: tb.SubBatchNorm1d, 4: tb.SubBatchNorm2d, 5: tb.SubBatchNorm3d}


class Chain(nn.Module):
    """Layers one after the other, perhaps with a tanh between them; some have two calls."""

    def __init__(self, layers: Sequence[nn.Module], dims: list[int]) -> None:
        super().__init__()
        self.layers, self.dims = nn.ModuleList(layers), dims

    def forward(self, x: Tensor, calls: Calls, L: int, mask: Tensor | None = None) -> Tensor:
        N, C = x.shape[:2]
        for i, (n, has_residual, activated) in enumerate(calls):
            x = torch.tanh(x) if activated else x
            x = x.reshape(shape(self.dims[n], N, C, L)) if i else x
            given = [torch.sin(x)] if has_residual else []
            if mask is None or hasattr(self.layers[n], "split_bn"):
                x = self.layers[n](x, *given)
            else:
                x = self.layers[n](x, *given, mask=mask.reshape((N, *x.shape[2:])))
        return x.reshape(N, C, L)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w

    def right_inverse(self, w: Tensor) -> Tensor:
        return w / 2


@dataclass
class Several:
    batches: list[Batches]
    disturbed: bool = False


class TorchTraining(Operations):
    """Training steps and evaluations; `checks_torch_machines` has what happens between them."""

    WAYS = (
        *("plain", "plain", "plain", "checkpoint", "penalty", "twice", "micro", "step", "thread"),
        *("hooks", "wider", "autocast", "no_grad", "inference_mode", "threads", "default_dtype"),
    )

    CHOICES = {
        "eps": (1e-5, 1e-3, 0.1), "momentum": (0.1, 0.7, None), "weighting": machines.WEIGHTINGS,
        "running_var_convention": machines.CONVENTIONS, "fuse_relu": (True, False),
    }  # fmt: skip
    COPIES = Operations.COPIES | {"save": saved}
    PARAMETERS = "weight", "bias"
    NEW_PARAMETERS = "data", "set_", "view", "copy_"
    GROUP = "process_group"
    check_sync = staticmethod(tb.check_sync)

    def __init__(self, world: Communicator, seed: int, *, names: Sequence[str] = ()) -> None:
        super().__init__(world, seed)
        torch._dynamo.reset()
        whole = self.partitions["world"]
        self.partitions |= dict.fromkeys(("None", "machine", "new"), whole)
        self.handles |= {"None": None, "machine": "machine", "1": 1}
        for name in ("new", "pair"):
            groups = [(dist.new_group(ranks), ranks) for ranks in self.partitions[name]]
            self.handles[name] = next(group for group, ranks in groups if self.rank in ranks)
        self.made = [self.handles[name] for name in ("new", "pair")]
        self.handles = {name: self.handles[name] for name in names or self.handles}
        dims: list[int] = []
        self.chain = Chain([self.layer(dims) for _ in range(self.rng.integers(3, 7))], dims)
        self.log(self.C, "channels:", self.chain, self.groups)

    @property
    def layers(self) -> Any:
        return self.chain.layers

    def new(self, group: Communicator) -> Any:
        return tb.SyncBatchNorm(self.C, process_group=group, momentum=1.0)

    def apply(self, layer: Any, x: Array, residual: Array | None = None) -> Any:
        dims = {id(of): n for of, n in zip(self.layers, self.chain.dims, strict=True)}
        given = [torch.from_numpy(a) for a in (x, residual) if a is not None]
        return layer(*(a.reshape(shape(dims.get(id(layer), 3), *a.shape)) for a in given))

    def buffers_of(self, layer: Any) -> Buffers:
        return {name: b.detach().double().clone() for name, b in layer.named_buffers()}

    def layer(self, dims: list[int]) -> Any:
        kind, group = self.pick(*BUILT, "converted", "sub", "parts"), self.pick(*self.handles)
        options: dict[str, Any] = {
            name: self.pick(*self.CHOICES[name]) for name in ("eps", "momentum")
        }
        options |= {"dtype": self.pick(F64, F64, torch.float32), "affine": self.odds(0.8)}
        options["track_running_stats"] = self.odds(0.9)
        own: Any = {"weighting": self.pick(*machines.WEIGHTINGS)}
        own["running_var"] = self.pick(*machines.CONVENTIONS)
        layer: Any
        if kind in BUILT:
            cls, choices = BUILT[kind]
            own |= {"fuse_relu": self.odds(0.3), "bias": self.odds(0.8)}
            layer = cls(self.C, process_group=self.handles[group], **options, **own)
            dims.append(self.pick(*choices))
        else:
            dims.append(self.pick(3, 4, 5))
            layer = PLAIN[dims[-1]](self.C, **options)
            if kind == "sub":
                own["process_group"] = self.handles[group]
                layer = SUB[dims[-1]](2, self.C, **options, **own)
            elif kind == "converted":
                tb.convert_sync_batchnorm(layer, self.handles[group], **own)
            else:
                group = "1"
                tb.convert_sub_batchnorm(layer, 2)
        self.groups.append(group)
        for p in layer.parameters():
            p.data.copy_(self.normal(self.C) + 1)
        return layer

    def close(self) -> None:
        del self.chain
        for group in self.made:
            dist.destroy_process_group(group)

    def norms(self) -> list[Norm]:
        found = []
        for layer, group in zip(self.layers, self.groups, strict=True):
            part = getattr(layer, "split_bn", layer)
            kind = "parts" if layer._num_splits > 1 else "whole"
            found.append(Norm(
                self.partitions[group], part.eps, part.momentum, layer.weighting,
                layer.running_var_convention, getattr(layer, "fuse_relu", False), layer.training,
                part.track_running_stats and part.running_mean is not None, layer._num_splits,
                kind="interleaved" if part is not layer else kind,
                frozen=layer.training and not part.training,
            ))  # fmt: skip
        return found

    def parameters(self) -> list[list[Tensor | None]]:
        return [
            [None if p is None else p.detach().double() for p in (layer.weight, layer.bias)]
            for layer in self.layers
        ]

    def coarsest(self, calls: Calls, dtype: str) -> str:
        layers = [self.layers[n] for n, *_ in calls]
        tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
        is_wide = dtype != "float64" or all(t.dtype != torch.float32 for t in tensors)
        return dtype if is_wide else "float32"

    def op_train(self, way: str = "", run: Any = None) -> None:
        way = way or self.pick(*self.WAYS)
        calls = self.calls(which=lambda norm: way != "step" or norm.kind == "whole")
        if not calls:
            return
        norms = [self.norms()[n] for n, *_ in calls]
        narrow = way == "plain" and run is None and len(calls) == 1 and not norms[0].relu
        dtype = self.pick("float64", "float64", "float32", *["float16", "bfloat16"] * narrow)
        if way == "penalty" and self.coarsest(calls, dtype) != "float64":
            way = "plain"  # float32 loses more than DELTA shows
        needs = [self.odds(0.8) for _ in self.layers] + [self.odds(0.8) or way == "penalty"]
        for layer, needed in zip(self.layers, needs, strict=False):
            for p in layer.parameters():
                p.requires_grad_(needed)
                p.grad = None
        parameters = [p for n, *_ in calls for p in self.layers[n].parameters()]
        if not (needs[-1] or any(p.requires_grad for p in parameters)):
            way = "no_grad"
        splits = any(norm.kind == "interleaved" for norm in norms)
        sizes = (0, 2, 4, 6) if splits else (0, 1, 2, 3, 4, 5)
        how = {"needs_x": needs[-1], "run": run}
        self.compare_step(way, calls, dtype, sizes, needs, **how)

    def tensor(self, x: Tensor, dtype: str, *, dense: bool = False) -> Tensor:
        """The numbers in memory of any layout."""
        strided = torch.from_numpy(self.laid_out(x))
        new = torch.empty(x.shape, dtype=getattr(torch, dtype))
        if dense or not x.numel():  # NumPy's strides of no element are not torch's
            return new.copy_(x)
        if strided.dtype == new.dtype:
            return strided
        return torch.empty_strided(x.shape, strided.stride(), dtype=new.dtype).copy_(strided)

    def step(
        self, b: Batches, calls: Calls, way: str, dtype: str, needs_x: bool = True, run: Any = None
    ) -> dict[str, Any]:
        N, C, L = b.xs[self.rank].shape
        takes_mask = all(not hasattr(self.layers[n], "split_bn") for n, *_ in calls)
        spreads = calls[0][2] or any(has_residual for _, has_residual, _ in calls)
        large = min(1e30, torch.finfo(getattr(torch, dtype)).max)  # infinity's sine is NaN
        paddings = [0.0, large, float("nan")][: 2 if spreads else 3]
        value, mask = self.padded(b, *paddings if takes_mask else ())
        x = self.tensor(value.reshape(shape(self.chain.dims[calls[0][0]], N, C, L)), dtype)
        # Compiled, torch's own batch norm in evaluation misreads gradients of other strides.
        dy = self.tensor(b.dys[self.rank], dtype, dense=run is not None)
        x.requires_grad_(needs_x)
        call = self.chain if run is None else run
        if way == "checkpoint":
            call = partial(checkpointed, self.chain)
        found: dict[str, Any] = {}

        def go() -> None:
            ys = [call(x, calls, L, mask) for _ in range(2 if way in ("micro", "step") else 1)]
            assert ys[0].dtype == dy.dtype
            found["y"] = ys[-1].detach().clone()
            if way in machines.WITHOUT_BACKWARD:
                return
            if way == "wider":
                wide = tb.SyncBatchNorm(40 + len(self.done))
                wide(torch.rand(3, wide.num_features, requires_grad=True)).sum().backward()
            if way == "penalty":
                loss = (ys[0] ** 3 * dy).sum()
                (g,) = torch.autograd.grad(loss, x, create_graph=True)
                ((g * g).sum() + loss).backward()
                return
            for y in reversed(ys):
                y.backward(dy, retain_graph=way == "twice")
            if way == "twice":
                ys[0].backward(dy)

        with self.surroundings(way, calls, needs_x):
            if way == "thread":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(go).result()
            else:
                go()
        if way not in machines.WITHOUT_BACKWARD:
            grads = self.gradients()
            if way == "penalty":  # whose gradient it is depends on whose loss
                share = self.world.allreduce
                grads = {key: None if g is None else share(g) for key, g in grads.items()}
            found |= {"dx": None if x.grad is None else x.grad.reshape(N, C, L)} | grads
        return found | flat(self.own_buffers())

    @contextmanager
    def surroundings(self, way: str, calls: Calls, needs_x: bool) -> Iterator[None]:
        """What is around a step, and is taken back."""
        contexts: dict[str, Any] = {
            "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
            "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
            "step": partial(tb.step_statistics, self.chain),
        }  # fmt: skip
        seen: list[Any] = []
        hooks: list[Any] = []
        for n in {n for n, *_ in calls} if way == "hooks" else ():
            layer = self.layers[n]
            hooks.append(layer.register_forward_hook(lambda *_: seen.append(0)))
            if needs_x:  # otherwise torch warns
                hooks.append(layer.register_full_backward_hook(lambda *_: None))
        threads, default = torch.get_num_threads(), torch.get_default_dtype()
        try:
            if way == "threads":
                torch.set_num_threads(2)
            if way == "default_dtype":
                torch.set_default_dtype(F64)
            with contexts.get(way, nullcontext)():
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(default)
            for hook in hooks:
                hook.remove()
        assert way != "hooks" or len(seen) == len(calls)

    def gradients(self) -> dict[str, Any]:
        found = {}
        for n, layer in enumerate(self.layers):
            for name in ("weight", "bias"):
                p = getattr(layer, name)
                if parametrize.is_parametrized(layer, name):
                    p = layer.parametrizations[name].original
                    found[f"d{name}{n}"] = None if p.grad is None else p.grad / 2
                elif p is not None:
                    found[f"d{name}{n}"] = p.grad
        return found

    def op_compiled(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo's
            backend = self.pick("aot_eager", "eager")
            self.op_train("plain", torch.compile(self.chain, backend=backend))

    def op_parametrized(self) -> None:
        _, layer = self.some_layer()
        if layer.weight is not None:
            parametrize.register_parametrization(layer, "weight", Doubled())
            self.op_train("plain")
            parametrize.remove_parametrizations(layer, "weight")

    def op_evaluate(self) -> None:
        modes = [module.training for module in self.chain.modules()]
        self.chain.eval()
        way, dtype = self.pick(*machines.WITHOUT_BACKWARD), self.pick("float64", "float32")
        self.compare_step(way, self.calls(), dtype, (0, 1, 2, 5), needs_x=False)
        for module, mode in zip(self.chain.modules(), modes, strict=True):
            module.training = mode

    def op_population(self) -> None:
        """`update_bn_stats` over two batches of each rank."""
        calls = self.calls(2, lambda norm: norm.kind == "whole" and not norm.frozen)
        calls = tuple((n, False, False) for n, *_ in calls)
        kept = [n for n, *_ in calls if self.layers[n].training and self.buffers[0][n]]
        if not kept:
            return
        self.log("  ", calls)

        def expected(several: Any) -> Expected:
            oracle = self.oracle(several)
            inputs: dict[int, list[Tensor]] = {}
            for b in several.batches:
                xs = b.xs
                for call in calls:
                    inputs.setdefault(call[0], []).extend(xs)
                    xs = self.run_oracle(oracle, (call,), b, xs)
            wanted = [dict(each) for each in self.buffers[self.rank]]
            for n in kept:
                rows = torch.cat([x.movedim(1, 2).reshape(-1, self.C) for x in inputs[n]])
                wanted[n] |= {"running_mean": rows.mean(0), "running_var": rows.var(0)}
            return flat(wanted)

        def forward(_: Any, x: Tensor) -> None:
            dims = self.chain.dims[calls[0][0]]
            self.chain(x.reshape(shape(dims, *x.shape)), calls, x.shape[2])

        draw = lambda: Several([self.batches("float64", (2, 3, 5)) for _ in (0, 1)])  # noqa: E731
        several, want, moved = self.until_accepted(draw, expected)
        tb.update_bn_stats(
            nn.ModuleList([self.layers[n] for n in {n: 0 for n, *_ in calls}]),
            [b.xs[self.rank] for b in several.batches],
            forward_fn=forward, progress=False, process_group=self.world,
        )  # fmt: skip
        found = flat(self.own_buffers())
        self.compare(found, want, moved, self.coarsest(calls, "float64"))
