"""Small programs that use a batch normalization link, as scripts for Chainer and ChainerMN do.

Each program calls `make(size, **options)` for its links, and returns what it has seen: numbers,
names and arrays, in lists. A program gives the same for the original link and for multibn's.
"""

import copy
import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import chainer  # isort: skip (its importer makes it importable)
from chainer import functions as F, links as L, training  # isort: skip
from chainer.training import extensions  # isort: skip

Make: TypeAlias = Callable[..., Any]
Program: TypeAlias = Callable[[Make, int], list[Any]]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def batch(seed: int, shape: tuple[int, ...] = (6, 3), dtype: Any = "f") -> Any:
    return np.random.default_rng(seed).normal(2, 3, shape).astype(dtype)


def loss(y: Any) -> Any:
    return F.sum(y**3)


def averages(link: Any) -> list[Any]:
    return [link.avg_mean.copy(), link.avg_var.copy(), link.N, type(link.N), link.avg_var.dtype]


def saved(link: Any) -> io.BytesIO:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, link)
    file.seek(0)
    return file


@program
def link_hooks(make: Make, seed: int) -> list[Any]:
    seen: list[Any] = []

    class Hook(chainer.LinkHook):
        name = "hook"

        def forward_preprocess(self, args: Any) -> None:
            seen.append([args.forward_name, len(args.args), sorted(args.kwargs)])

        def forward_postprocess(self, args: Any) -> None:
            seen.append([args.out.shape, args.out.dtype])

    link = make(3)
    with Hook():
        link(batch(seed))
    link.add_hook(Hook())
    link(batch(seed), finetune=True)
    link.delete_hook("hook")
    link(batch(seed))
    return [*seen, *averages(link)]


@program
def graphs(make: Make, seed: int) -> list[Any]:
    link = make(3)
    labels = []
    for is_training in (True, False):
        with chainer.using_config("train", is_training):
            y = link(chainer.Variable(batch(seed)))
        dot = chainer.computational_graph.build_computational_graph([F.sum(y)]).dump()
        labels.append(sorted(re.findall(r'label="([^"]*)"', dot)))
    return [*labels, y.creator.label]


@program
def parameters_of_another_link(make: Make, seed: int) -> list[Any]:
    first, second, third = make(3), make(3), make(3)
    first(batch(seed), finetune=True)
    first.gamma.array[...] = 7
    second.copyparams(first)
    third.copyparams(first, copy_persistent=False)
    chainers = L.BatchNormalization(3)
    chainers.copyparams(first)
    back = make(3)
    back.copyparams(chainers)
    return [[link.gamma.array, *averages(link)] for link in (second, third, chainers, back)]


@program
def copies(make: Make, seed: int) -> list[Any]:
    link = make(3, initial_gamma=chainer.initializers.Constant(2))
    link(batch(seed))
    link.gamma.array[...] = 9
    seen = []
    for mode in ("share", "copy", "init"):
        other = link.copy(mode=mode)
        shared = other.gamma.array is link.gamma.array, other.avg_mean is link.avg_mean
        seen.append([*shared, other.gamma.array, *averages(other)])
    for other in (copy.copy(link), copy.deepcopy(link)):
        seen.append([other.gamma is link.gamma, *averages(other)])
    return seen


@program
def repeated_in_a_sequential(make: Make, seed: int) -> list[Any]:
    seen = []
    for mode in ("init", "copy", "share"):
        part = chainer.Sequential(L.Linear(3, 3, initialW=np.eye(3)), make(3), F.relu)
        model = part.repeat(2, mode=mode)
        y = model(batch(seed))
        names = [name for name, _ in sorted(model.namedparams())]
        seen.append([len(model), names, y.array, *averages(model[0][1]), *averages(model[1][1])])
    return seen


@program
def files(make: Make, seed: int) -> list[Any]:
    link, loaded = make(3), make(3)
    for each in (link, loaded):
        with each.init_scope():
            each.extra = chainer.Parameter(0.0, (2,))
        each.add_persistent("note", np.zeros(2))
    for i in range(2):
        link(batch(seed + i), finetune=True)
    chainer.serializers.load_npz(saved(link), loaded)
    arrays = {name: [a.dtype, a] for name, a in np.load(saved(link)).items()}
    chainers = L.BatchNormalization(3)
    chainer.serializers.load_npz(saved(link), chainers)
    back = make(3)
    chainer.serializers.load_npz(saved(chainers), back)
    seen = [
        link.count_params(),
        sorted(arrays.items()),
        averages(loaded),
        averages(chainers),
        averages(back),
    ]
    without = saved(make(3, use_beta=False))
    try:
        chainer.serializers.load_npz(without, make(3))
    except KeyError as error:
        seen.append([str(error)])
    return seen


@program
def devices(make: Make, seed: int) -> list[Any]:
    link = make(3)
    link(batch(seed))
    seen: list[Any] = [link.to_device("@numpy") is link, link.from_chx() is link, link.device]
    for device in ("@cupy:0", "@intel64", "native:0"):
        try:
            link.to_device(device)
        except Exception as error:  # this machine has none of them
            seen.append(type(error))
    return [*map(str, seen), link.xp.__name__, link(batch(seed)).array]


@program
def finetuning(make: Make, seed: int) -> list[Any]:
    link = make(3)
    seen = []
    for passes in (3, 1):
        link.start_finetuning()
        for i in range(passes):
            link(batch(seed + i), finetune=True)
        seen.append(averages(link))
    link.decay = 0.5
    link(batch(seed))
    link.avg_mean, link.avg_var, link.N = np.zeros(3, "f"), np.ones(3, "f"), 3
    link(batch(seed + 1), finetune=True)
    return [*seen, averages(link)]


@program
def configurations(make: Make, seed: int) -> list[Any]:
    link = make(3)
    link(batch(seed))
    with chainer.using_config("train", False):
        evaluated = [link(batch(seed)), link(batch(seed), finetune=True)]
    with chainer.no_backprop_mode():
        y = link(batch(seed))
        with chainer.force_backprop_mode():
            z = link(chainer.Variable(batch(seed)))
    flags = [y.creator is None, y.requires_grad, z.creator is None]
    return [[e.array for e in evaluated], flags, *averages(link)]


@program
def dtypes(make: Make, seed: int) -> list[Any]:
    seen = []
    for of_parameters, of_input in ((chainer.mixed16, "e"), ("d", "f"), ("f", "d"), ("f", "e")):
        with chainer.using_config("dtype", of_parameters):
            link = make(3)
        x = chainer.Variable(batch(seed, dtype=of_input))
        y = link(x)
        loss(F.cast(y, "f")).backward()
        with chainer.using_config("train", False):
            z = link(x)
        seen.append([y.dtype, x.grad.dtype, link.gamma.grad.dtype, link.avg_var.dtype, z.dtype])
    return seen


@program
def optimizers(make: Make, seed: int) -> list[Any]:
    model = chainer.Sequential(make(3), L.Linear(3, 2, initialW=np.eye(2, 3)), make(2))
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    model[0].gamma.update_rule.hyperparam.lr = 0.01
    model[2].disable_update()
    for i in range(3):
        optimizer.update(lambda x: F.mean(model(x) ** 2), batch(seed + i))
    frozen = model[2].update_enabled
    model.cleargrads()
    for i in range(2):  # gradients of two batches, with a scale
        loss(model(batch(seed + i))).backward(loss_scale=8)
    parameters = [p for _, p in sorted(model.namedparams())]
    return [frozen, [p.array for p in parameters], [p.grad for p in parameters]]


@program
def gradients(make: Make, seed: int) -> list[Any]:
    link = make(3, dtype="d")
    x = chainer.Variable(batch(seed, dtype="d"))
    first = chainer.grad([loss(link(x))], [link.gamma, link.beta, x])
    other = make(3, dtype="d")
    for parameter in other.params():
        parameter.grad = np.zeros(3)
    loss(link(x)).backward()
    other.addgrads(link)
    with chainer.using_config("train", False):
        loss(link(x)).backward()
    return [[g.array for g in first], x.grad, link.gamma.grad, other.gamma.grad, other.beta.grad]


@program
def variables_in_place_of_parameters(make: Make, seed: int) -> list[Any]:
    """A batch normalization whose scale another network computes has these."""
    link = make(3, use_gamma=False, use_beta=False)
    link.gamma, link.beta = (chainer.Variable(np.arange(1, 4, dtype="f") * k) for k in (1, 2))
    y = link(batch(seed))
    loss(y).backward()
    return [y.array, link.gamma.grad, link.beta.grad, [*link.namedparams()], link.count_params()]


@program
def a_trainer_of_one_process(make: Make, seed: int) -> list[Any]:
    model = L.Classifier(
        chainer.Sequential(make(3), L.Linear(3, 2, initialW=np.eye(2, 3))), label_key=-1
    )
    pairs = chainer.datasets.TupleDataset(batch(seed), np.array([0, 1] * 3, "i"))
    batches = chainer.iterators.SerialIterator(pairs, 6, shuffle=False)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    two_models = {"main": "@numpy", "second": "@numpy"}
    updater = training.updaters.ParallelUpdater(batches, optimizer, devices=two_models)
    with tempfile.TemporaryDirectory() as out:
        trainer = training.Trainer(updater, (2, "iteration"), out=out)
        trainer.extend(extensions.ParameterStatistics(model))
        trainer.extend(extensions.snapshot_object(model, "model"), trigger=(1, "iteration"))
        trainer.extend(extensions.DumpGraph("main/loss"))
        trainer.extend(extensions.FailOnNonNumber())
        trainer.run()
        names = sorted(file.name for file in Path(out).iterdir())
        arrays = dict(np.load(Path(out, "model")))
        labels = sorted(re.findall(r'label="([^"]*)"', Path(out, "cg.dot").read_text()))
    return [names, sorted(arrays.items()), labels]


def assert_same(actual: Any, expected: Any) -> None:
    """Equal, numbers of type float up to the rounding of float32."""
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected), (actual, expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray | float | np.floating):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-4)
    else:
        assert actual == expected
