"""Every option of a layer does what it says, in every way in which a layer runs.

Each option gets another value than the default. Two ranks, which hold unlike numbers of
samples and of elements, take two steps and evaluate; a float64 oracle that knows no layer computes
what must come out.
"""

import inspect
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multibn import chainer_backend as cb
from multibn import torch_backend as tb
from multibn.options import NormOptions
from multibn.parity import oracle
from multibn.torch_backend.layer.base import SharingOptions
from tests.helpers.ranks import run_ranks
from tests.helpers.spread import OTHERS
from tests.torch_backend.convert.test_class_swap import Activated, Copied

import chainer  # isort: skip  (the backend makes it importable)

NEEDS = "torch chainer"

C, LOCK = 3, threading.Lock()
WEIGHT, BIAS = np.array([1.5, -0.5, 1.0]), np.array([0.5, 0.1, -1.0])
# torch's own eps would hide a call without any.
DEFAULTS: dict[str, Any] = vars(tb.SyncBatchNorm.Options(eps=0.1))
SHARING = " ".join(SharingOptions.__annotations__)
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _batch(rank: int, seed: int) -> np.ndarray[Any, Any]:
    """A batch of 4 samples and 20 elements per channel on rank 0, of 2 and 6 on rank 1."""
    # Variances, of batches and running ones, are below 1.5 in the first channel, above in the last.
    shape, scale = [(4, C, 5), (2, C, 3)][rank], np.array([[0.5], [1.0], [2.0]])
    return scale * np.random.default_rng(10 * rank + seed).normal(rank, 1 + rank, shape)


XS, DYS = ([[_batch(rank, seed + 2 * n) for rank in (0, 1)] for n in (0, 1)] for seed in (0, 4))


def _of(o: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: o[name] for name in names.split()}


def _taken(function: Callable[..., Any], options: Iterable[str]) -> set[str]:
    """The options that are keywords of a function."""
    parameters = inspect.signature(function).parameters
    return {name for name in options if name in parameters and parameters[name].kind == KEYWORD}


def _bn(kind: Any, o: dict[str, Any]) -> Any:
    layer = kind(C, **_of(o, "eps momentum affine track_running_stats"), dtype=torch.float64)
    if not o["bias"]:
        layer.register_parameter("bias", None)
    if hasattr(layer, "act"):
        layer.act = nn.Identity()
    return layer


def _convert(kind: Any, comm: Any, o: dict[str, Any]) -> Any:
    layer = tb.convert_sync_batchnorm(_bn(kind, o), comm, **_of(o, SHARING))
    layer.fuse_relu = o["fuse_relu"]
    return layer


def _build(kind: Any, names: str, comm: Any, o: dict[str, Any], **more: Any) -> Any:
    options = _of(o, f"eps momentum affine bias track_running_stats {SHARING} {names}") | more
    return kind(num_features=C, process_group=comm, dtype=torch.float64, **options)


def _split(comm: Any, o: dict[str, Any]) -> Any:
    """Two parts by default: one part is no split layer."""
    layer = tb.convert_sub_batchnorm(_bn(nn.BatchNorm1d, o), 1 + o["num_splits"])
    layer.configure(layer.process_group, **_of(o, SHARING))
    return layer


class Function(nn.Module):
    """`sync_batch_norm` as a layer without running statistics."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, comm: Any, o: dict[str, Any]) -> None:
        super().__init__()
        names = _taken(tb.sync_batch_norm, o) - {"momentum", "running_var"}  # of its own tensors
        self.options = {name: o[name] for name in names}
        self.comm = comm
        for name, wanted in (("weight", o["affine"]), ("bias", o["affine"] and o["bias"])):
            p = nn.Parameter(torch.zeros(C, dtype=torch.float64)) if wanted else None
            self.register_parameter(name, p)

    def forward(self, x: Tensor) -> Tensor:
        call = partial(tb.sync_batch_norm, process_group=self.comm, **self.options)
        return call(x, self.weight, self.bias)[0]


# Options that Chainer's link has neither under this nor under another name.
LINK_LACKS = DEFAULTS.keys() - vars(NormOptions()) - {"momentum", "affine", "bias", "running_var"}

Make = Callable[[Any, dict[str, Any]], Any]
Way: TypeAlias = tuple[str, str, str]
LAYERS: dict[str, Make] = {
    "layer": partial(_build, tb.SyncBatchNorm, "fuse_relu"),
    "untracked": partial(_build, tb.SyncBatchNorm, "fuse_relu", track_running_stats=False),
    "naive": partial(_build, tb.NaiveSyncBatchNorm1d, "fuse_relu", global_sync=True),
    "renorm": partial(_build, tb.SyncBatchRenorm1d, ""),  # a batch norm for 5000 batches
    "sub": partial(_build, tb.SubBatchNorm1d, "num_splits"),
    "converted": partial(_convert, nn.BatchNorm1d),
    "own forward": partial(_convert, Activated),
    "own call": partial(_convert, Copied),
    "split": _split,
    "function": Function,
}
# The options that such a layer has not, that have no meaning there, or a test of their own.
LACKS = {
    "layer": "nonfinite num_splits",
    "untracked": "nonfinite num_splits track_running_stats",
    "naive": "nonfinite num_splits",
    "renorm": "nonfinite fuse_relu num_splits",
    "sub": "nonfinite fuse_relu",
    "converted": "nonfinite num_splits",
    "own forward": "nonfinite num_splits",
    "own call": "nonfinite num_splits",
    "split": "nonfinite fuse_relu weighting",
    "function": "nonfinite fuse_relu num_splits momentum running_var track_running_stats",
    "link": " ".join(["nonfinite", *LINK_LACKS]),
    "converted link": " ".join(["nonfinite", "fuse_relu", *LINK_LACKS]),
}


def _step(run: Any, layer: Any, x: Tensor, dy: Tensor, **options: Any) -> list[Tensor]:
    inputs = [x.requires_grad_(), *(p for p in (layer.weight, layer.bias) if p is not None)]
    y = run(x)
    return [y, *torch.autograd.grad(y, inputs, dy, **options)]


def _compiled(layer: Any, x: Tensor, dy: Tensor, backend: str = "aot_eager") -> list[Tensor]:
    return _step(torch.compile(layer, backend=backend, fullgraph=True), layer, x, dy)


def _checkpointed(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    again = partial(checkpoint, use_reentrant=False, context_fn=tb.checkpoint_contexts)
    return _step(partial(again, layer), layer, x, dy)


def _in_a_step(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    with tb.step_statistics(layer):
        return _step(layer, layer, x, dy)


def _masked(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    lengths = torch.full((len(x),), x.shape[2])
    return _step(partial(layer, lengths=lengths), layer, x, dy)


def _of_mixed_dtypes(layer: Any, x: Tensor) -> Tensor:
    """Torch's own function refuses these."""
    if layer.weight is not None:
        layer.weight.data = layer.weight.data.float()
    y: Tensor = layer(x)
    return y


STEPS: dict[str, Callable[..., list[Tensor]]] = {
    "eager": lambda layer, x, dy: _step(layer, layer, x, dy),
    "compiled": _compiled,
    "double backward": lambda layer, x, dy: _step(layer, layer, x, dy, create_graph=True),
    "checkpointed": _checkpointed,
    "step statistics": _in_a_step,
    "masked": _masked,
    # Of layers that call the plain one's operators: their own backward is in test_every_layer.
    "traced": partial(_compiled, backend="eager"),
}
EVALUATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "eager": lambda layer, x: layer(x),
    "compiled": lambda layer, x: torch.compile(layer, backend="aot_eager")(x),
    "masked": lambda layer, x: layer(x, mask=torch.ones(len(x), x.shape[2], dtype=torch.bool)),
    "mixed dtypes": _of_mixed_dtypes,
    "exported": lambda layer, x: torch.export.export(layer, (x,)).module()(x),
}
# A layer, and how it trains and evaluates.
WAYS = [
    *((name, "eager", "eager") for name in LAYERS),
    *(("layer", step, step if step in EVALUATIONS else "eager") for step in [*STEPS][:-1]),
    *((name, "eager", "exported") for name in ("layer", "sub", "own forward", "own call")),
    *(("untracked", "eager", name) for name in EVALUATIONS),
    *((name, "traced", "compiled") for name in ("sub", "own call")),
    *((name, "double backward", "eager") for name in ("sub", "own call")),
    ("layer", "eager", "mixed dtypes"),
    ("link", "eager", "eager"),
    ("converted link", "eager", "eager"),
    ("link", "double backward", "eager"),
]
WAYS = list(dict.fromkeys(WAYS))
ALONE = "affine", "bias", "track_running_stats", "num_splits"


def _options(way: Way) -> Iterator[dict[str, Any]]:
    """Other options than the defaults: one by one, or together where each case compiles."""
    values = {name: each for name, each in OTHERS.items() if name not in LACKS[way[0]].split()}
    if way[:2] == ("own call", "traced"):
        # torch's own pass divides by its counter then, which no graph can do.
        values["momentum"] = [each for each in values["momentum"] if each is not None]
    together = {}
    if {"compiled", "traced", "exported"} & {*way}:
        together = {name: each for name, each in values.items() if name not in ALONE}
    for n in range(max(map(len, together.values()), default=0)):
        yield {name: each[n % len(each)] for name, each in together.items()}
    for name in [name for name in values if name not in together]:
        for value in values[name]:
            yield {name: value}


CASES = [(way, options) for way in WAYS for options in _options(way)]


def _train(way: Way, o: dict[str, Any], comm: Any, xs: Any = XS) -> dict[str, Any]:
    """The second step's output and gradients of a torch layer, and what is left of both steps."""
    name, step, evaluation = way
    layer = LAYERS[name](comm, o)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for key, values in (("weight", WEIGHT), ("bias", BIAS)):
            if (p := getattr(layer, key)) is not None:
                p.copy_(torch.tensor(values))
                found[f"d{key}"] = None
    for step_xs, step_dys in zip(xs, DYS, strict=True):
        arrays = (torch.tensor(v[comm.rank]) for v in (step_xs, step_dys))
        # One thread alone can compile.
        results = STEPS["eager" if comm.rank and step in ("compiled", "traced") else step](
            layer, *arrays
        )
    found = dict(zip(("y", "dx", *found), results, strict=True))
    if name != "function":
        bn: Any = getattr(layer, "bn", layer)
        found |= {"running_mean": bn.running_mean, "running_var": bn.running_var}
        with torch.no_grad(), LOCK:
            x = torch.tensor(XS[0][comm.rank])
            # By the same code on both ranks: a compilation takes a second.
            evaluation = "eager" if comm.rank and evaluation == "compiled" else evaluation
            found["evaluation"] = EVALUATIONS[evaluation](layer.eval(), x)
    return {key: v.detach().numpy() for key, v in found.items() if v is not None}


def _train_link(way: Way, o: dict[str, Any], comm: Any, xs: Any = XS) -> dict[str, Any]:
    """What `_train` returns, of Chainer's link."""
    words: dict[str, Any] = {"use_gamma": o["affine"], "use_beta": o["affine"] and o["bias"]}
    words |= {"avg_var": o["running_var"], "decay": 1 - (o["momentum"] or 0)}
    words |= {"initial_gamma": WEIGHT, "initial_beta": BIAS, "dtype": np.float64}
    words |= _of(o, " ".join(vars(NormOptions())))
    if way[0] == "link":
        link: Any = cb.MultiNodeBatchNormalization(C, comm, **words)
    else:
        given = {name: words.pop(name) for name in _taken(cb.create_mnbn_model, words)}
        del words["fuse_relu"]
        link = cb.create_mnbn_model(chainer.links.BatchNormalization(C, **words), comm, **given)
    link.avg_var[:] = 1
    learned = {"dweight": link.gamma, "dbias": link.beta}
    parameters = {key: p for key, p in learned.items() if p is not None}
    for step_xs, step_dys in zip(xs, DYS, strict=True):
        x = chainer.Variable(step_xs[comm.rank])
        y = link(x, finetune=o["momentum"] is None)
        inputs, twice = [x, *parameters.values()], way[1] == "double backward"
        dy = chainer.Variable(step_dys[comm.rank])
        grads = chainer.grad([y], inputs, [dy], enable_double_backprop=twice)
    found = dict(zip(("y", "dx", *parameters), (y, *grads), strict=True))
    with chainer.using_config("train", False):
        found["evaluation"] = link(XS[0][comm.rank])
    arrays = {key: v.array for key, v in found.items()}
    return arrays | {"running_mean": link.avg_mean, "running_var": link.avg_var}


def _normalized(
    parts: list[tuple[int, Any]], n: int, o: dict[str, Any], weight: Any, bias: Any
) -> oracle.Result:
    """The normalized samples of ranks that share their statistics, in the n-th step."""
    xs, dys = ([v[n][rank][samples] for rank, samples in parts] for v in (XS, DYS))
    options: Any = {name: o[name] for name in _taken(oracle.batch_norm, o)}
    run: Any = partial(oracle.batch_norm, xs, **options)
    result = run(dys, weight, bias)
    if not o["fuse_relu"]:
        return result
    result = run([dy * (y > 0) for dy, y in zip(dys, result.y, strict=True)], weight, bias)
    result.y = [np.maximum(y, 0) for y in result.y]
    return result


def _expected(name: str, o: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank must have, by the oracle."""
    weight = WEIGHT if o["affine"] else np.ones(C)
    bias = BIAS if o["affine"] and o["bias"] else np.zeros(C)
    counts, whole = [20, 6], slice(None)
    groups: list[list[tuple[int, Any]]] = [[(0, whole), (1, whole)]]
    if name == "sub" and o["num_splits"] > 1:
        groups = [[(0, slice(k, None, 2)), (1, slice(k, None, 2))] for k in (0, 1)]
    elif name == "split":
        parts = [np.array_split(np.arange(len(x)), min(1 + o["num_splits"], len(x))) for x in XS[0]]
        groups = [[(rank, part)] for rank in (0, 1) for part in parts[rank]]
    ranks: list[dict[str, Any]] = [
        {"y": np.zeros_like(x), "dx": np.zeros_like(x), "dweight": 0, "dbias": 0} for x in XS[1]
    ]
    for group in groups:
        result = _normalized(group, 1, o, weight, bias)
        for k, (rank, samples) in enumerate(group):
            ranks[rank]["y"][samples], ranks[rank]["dx"][samples] = result.y[k], result.dx[k]
        for found in ranks:  # each with the sums over the ranks
            found["dweight"] = found["dweight"] + result.dweight
            found["dbias"] = found["dbias"] + result.dbias
    for rank, found in enumerate(ranks):
        mean, var = np.zeros(C), np.ones(C)
        for n in (0, 1):
            shared = [(rank, whole)] if name == "split" else [(0, whole), (1, whole)]
            result = _normalized(shared, n, o, weight, bias)
            local = o["running_var"] == "unbiased_local"
            count = counts[rank] if local else result.count
            factor = 1.0 if o["running_var"] == "biased" else count / (count - 1)
            momentum = o["momentum"] or 1 / (n + 1)
            mean, var = oracle.running((mean, var), result.mean, result.var, factor, momentum)
        if o["track_running_stats"] and name != "untracked":
            found |= {"running_mean": mean, "running_var": var}
        else:
            alone = _normalized([(rank, whole)], 0, o, weight, bias)
            mean, var = alone.mean, alone.var
        x = XS[0][rank]
        options: Any = {name: o[name] for name in _taken(oracle.normalize, o)}
        options |= {"mask": np.ones((len(x), x.shape[2]), bool)}
        y = oracle.normalize(x, mean, var, weight, bias, **options)
        found["evaluation"] = np.maximum(y, 0) if o["fuse_relu"] else y
    return ranks


def test_every_option_is_tried() -> None:
    untried = {field.name for field in fields(tb.SyncBatchNorm.Options)} ^ OTHERS.keys()
    assert not untried, (
        f"tests/helpers/spread.py needs other values of, and of these alone: {untried}"
    )


@pytest.mark.parametrize("name", SharingOptions.__annotations__)
def test_a_layer_that_was_pickled_before_an_option_has_its_default(name: str) -> None:
    layer = tb.SyncBatchNorm(C)
    attribute = layer.Options.attributes.get(name, name)
    del vars(layer)[attribute]
    loaded = pickle.loads(pickle.dumps(layer))
    default = getattr(layer.Options, name)
    message = f"`SyncNormBase.{attribute}` must be {default!r}"
    assert getattr(loaded, attribute, "missing") == default, message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo itself
@pytest.mark.parametrize("way, options", CASES, ids=str)
def test_an_option_does_what_it_says(way: Way, options: dict[str, Any]) -> None:
    o = DEFAULTS | options
    ranks = run_ranks(2, partial(_train_link if "link" in way[0] else _train, way, o))
    eager = ranks
    if {"compiled", "traced"} & {*way}:
        eager = run_ranks(2, partial(_train, (way[0], "eager", "eager"), o))
    wrong = []
    for rank, (found, right) in enumerate(zip(ranks, _expected(way[0], o), strict=True)):
        for key, array in found.items():
            if not np.array_equal(array, eager[rank][key]):
                wrong.append(f"{key} on rank {rank}: other bits than eager")
            if way[0] == "sub" and "num_splits" in options and key not in ("y", "dx"):
                continue  # of a population, see test_sub_batch_norm
            if key in ("dweight", "dbias"):
                array = sum(each[key] for each in ranks)
            if (error := oracle.relative_error(array, right[key])) > 1e-9:
                wrong.append(f"{key} on rank {rank}: off by {error:.2g}")
    assert not wrong, f"`{options}` is ignored, or wrong, in {way}: {'; '.join(wrong)}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*has skipped a batch")
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize(
    "way", {way[:2]: way for way in WAYS if way[0] != "split"}.values(), ids="-".join
)
def test_nonfinite_does_what_it_says(way: Way, nonfinite: str) -> None:
    """Both ranks have an error, or an output of NaN and nothing moved."""
    first, (own, other) = XS
    o, xs = DEFAULTS | {"nonfinite": nonfinite}, [first, [own, other * np.nan]]
    train = partial(_train_link if "link" in way[0] else _train, way, o, xs=xs)
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError):
            run_ranks(2, train)
        return
    for found in run_ranks(2, train):
        assert np.isnan(found["y"]).all(), f"`nonfinite` is ignored in {way}"
        assert np.isfinite(found.get("running_var", 0)).all(), f"a batch was not skipped in {way}"
