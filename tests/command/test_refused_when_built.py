"""A number, a choice or a flag that cannot be right is refused when a public object is built.

An argument of one name has one rule in all public constructors and factories, whose signatures say
which arguments they have. An error names the argument, and comes before any data is seen.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import pytest
import torch
from torch import nn

from multibn import Group, as_communicator, checkpoint
from multibn import torch_backend as tb
from multibn._typing import Nonfinite, RunningVar, Weighting
from multibn.communicators.transports.chainermn import select_backend
from multibn.communicators.transports.mpi import MPI
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.torch_backend import reversible as rev
from multibn.torch_backend.layer.base import SyncNormBase
from tests.helpers import require
from tests.helpers.spread import REFUSED

NEEDS = "torch"

nan, inf = math.nan, math.inf


class Wrong(NamedTuple):
    """Values that an argument must refuse, and the words that name the argument.

    None may be one of them, and is left out where the signature takes None.
    """

    values: tuple[Any, ...]
    named: str = ""  # default: the argument's name in backticks


_NOT_INTS = (2.5, nan, inf, "2", True)
_NOT_NUMBERS = (nan, "0.5", True)
NUMBER = Wrong((*_NOT_NUMBERS, inf, None))
POSITIVE = Wrong((0, -0.5, *NUMBER.values))
SHARE = Wrong((-0.1, 1.1, *NUMBER.values))  # in [0, 1]
PROBABILITY = Wrong((-0.1, 1.0, *NUMBER.values))  # in [0, 1)
ANY_INT = Wrong((*_NOT_INTS, None))
COUNT = Wrong((-1, *ANY_INT.values))  # from 0
POSITIVE_INT = Wrong((0, *COUNT.values))
CHOICE = Wrong(("nothing", 3, True, None))
BOOL = Wrong(("no", 2, 0.5, None))
# Positive, one for each axis.
INTS = Wrong(((0, 1, 1), (1.5, 1, 1), ("1", 1, 1), (True, 1, 1), (1, 1), 3))
ANYTHING = Wrong(())
_OPTIMIZER = torch.optim.SGD(nn.Linear(1, 1).parameters())
MODEL = Wrong(
    (_OPTIMIZER,), r"` must be a (torch\.nn\.Module|chainer\.Link): got SGD\. (Pass t|The o)"
)
GROUP = Wrong((0, -1, 2.5, "nothing", True, [0, 0]), "a communicator must|a group must|a list of")

_RULES = {
    "process_group comm parent obj": GROUP,
    "spec": Wrong((None, *GROUP.values), GROUP.named),
    **{name: Wrong(values) for name, values in REFUSED.items()},
    "decay": SHARE,
    "running_var communication_backend how estimator": CHOICE,
    "mode norm name pool_mode head_act respath_fuse pre_q_fusion drop_path_mode": CHOICE,
    "num_features num_samples num_iters every_n_epochs": POSITIVE_INT,
    "interval crop_size num_frames in_channels num_classes embed_dim num_heads": POSITIVE_INT,
    "depth dim": POSITIVE_INT,
    "num_sync_devices": Wrong(_NOT_INTS),
    "rmax": Wrong((0.5, *_NOT_NUMBERS, inf)),
    "dmax": Wrong((-0.5, *_NOT_NUMBERS, inf)),
    "schedule": Wrong(((0, 1), (-1, 0, 0), (0.5, 1, 1), 3)),
    "counts": Wrong(((), (1, 2), *((n,) for n in POSITIVE.values))),
    "running_mean": Wrong((3, "no", torch.ones(4, 1))),
    "instance_norms": Wrong((("absent",), (3,))),
    "size": Wrong((0, -1, 2.5, "2", True, (3, 0), (3, 2.0))),
    "axis": Wrong((-1, 2.5, "0", True, (), (0, -1), (0, 0), (0, "1"), [[0]], {0}, 2, (0, 3))),
    "mlp_ratio": POSITIVE,
    "head_init_scale": NUMBER,
    "head_dropout_rate dropout_rate droppath_rate": PROBABILITY,
    "patch_kernel patch_stride pool_kv_stride_adaptive pool_kvq_kernel": INTS,
    "patch_padding": Wrong(((-1, 1, 1), *INTS.values[1:])),
    "pool_q_stride pool_kv_stride": Wrong(
        (((1, 0, 1, 1),), ((1, 2.5, 1, 1),), ((1, "2", 1, 1),), ((-1, 1, 1, 1),), 3)
    ),
    "dim_mul head_mul": Wrong((((1, 0),), ((1, nan),), ((1, "2"),), ((-1, 2),), ((1.0, 2),), 2)),
    "drop_path": Wrong(((0.1, 1.0), (0.1, -0.5), (0.1, nan), (0.1, "0.1"), (0.1, True), (0.1,))),
    "buffer_layers": Wrong(((-1,), ("1",), (0.5,), (True,), 1)),
    "model module link target": MODEL,
    "parameters": Wrong((_OPTIMIZER,), "`parameters` must be tensors: got SGD. Pass the model"),
    # No numbers, no choices: arrays, functions, names, and what torch or Chainer refuses.
    "blocks config others group comm_type": ANYTHING,
    "x weight bias mask lengths arrays state states data_loader iterator": ANYTHING,
    "device dtype stream_dtype initial_gamma initial_beta": ANYTHING,
    "args torch_options forward_fn empty converter eval_func ignore names prefix src dst": ANYTHING,
    "source transposed count": ANYTHING,  # tests/checkpoint/test_flax.py
}
RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}
EXEMPT = {
    "communicators.transports.mpi.MPI(comm=)",  # looking at it initialises MPI
    "checkpoint.translate.convert(target=)",  # the name of a framework
    "torch_backend.integrations.lightning.MultiBNLayerSync(module=)",  # of a conversion, later
    "torch_backend.reversible.mvit.model.ReversibleMViT(model=)",  # by the original's signature
}
# What takes the arguments that a callable hands on by `**` and this name.
HANDED_ON = {
    "bn_args": "SyncBatchNorm",
    "torch_options": "SyncGroupNorm",
    "options": "convert_sync_batchnorm",
}

Call: TypeAlias = Callable[..., Any]  # with valid arguments, to which one that is wrong is added


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def _with(function: Call, **makers: Callable[[], Any]) -> Call:
    """The function, with arguments that are made anew for each call."""
    return lambda **given: function(**{name: make() for name, make in makers.items()} | given)


def _torch() -> dict[Call, Call]:
    x = torch.randn(4, 3)

    def converted() -> Any:
        return tb.convert_sync_batchnorm(_model())

    kinds = [v for v in vars(tb).values() if isinstance(v, type)]
    layers = [v for v in kinds if issubclass(v, SyncNormBase)]
    sub = [v for v in layers if "num_splits" in inspect.signature(v).parameters]
    found: dict[Call, Call] = {
        **{cls: partial(cls, num_features=3) for cls in layers},
        **{cls: partial(cls, num_splits=2, num_features=3) for cls in sub},
        tb.SyncGroupNorm: partial(tb.SyncGroupNorm, 1, 3),
        tb.average_gradients: _with(tb.average_gradients, parameters=_model),
        tb.batch_moments: partial(tb.batch_moments, x),
        tb.sync_batch_norm: partial(tb.sync_batch_norm, x),
    }
    of_models: dict[Call, dict[str, Callable[[], Any]]] = {
        **{f: {"model": _model} for f in (tb.check_sync, tb.sync_running_stats, tb.join)},
        tb.convert_sync_groupnorm: {"module": lambda: nn.Sequential(nn.GroupNorm(1, 3))},
        tb.convert_sync_batchnorm: {"module": _model},
        tb.convert_sub_batchnorm: {"module": _model, "num_splits": lambda: 2},
        tb.revert_sync_batchnorm: {"module": converted},
        tb.step_statistics: {"model": converted},
    }
    stats = {"model": _model, "data_loader": lambda: [x], "num_iters": lambda: 1, "progress": bool}
    of_models[tb.update_bn_stats] = stats
    return found | {function: _with(function, **makers) for function, makers in of_models.items()}


def _trainers() -> dict[Call, Call]:
    from multibn.torch_backend.integrations.lightning import MultiBNLayerSync, PreciseBN
    from multibn.torch_backend.integrations.mmengine import PreciseBNHook

    return {
        MultiBNLayerSync: MultiBNLayerSync,
        PreciseBN: partial(PreciseBN, num_samples=8),
        PreciseBNHook: PreciseBNHook,
    }


def _reversible() -> dict[Call, Call]:
    blocks: Any = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    small = rev.RevMViTConfig(depth=1, embed_dim=16)
    return {
        rev.ReversibleSequence: partial(rev.ReversibleSequence, blocks),
        rev.RevMViTConfig: rev.RevMViTConfig,
        rev.RevMViT: partial(rev.RevMViT, small),
        rev.ReversibleMViT: partial(rev.ReversibleMViT, small),
    }


def _chainer() -> dict[Call, Call]:
    from multibn import chainer_backend as cb  # noqa: I001  (makes chainer importable)
    import chainer
    import chainer.links as L

    x = np.ones((4, 3), "f") * np.arange(4, dtype="f")[:, None]

    def model() -> Any:
        return chainer.Sequential(L.Linear(3, 3), L.BatchNormalization(3))

    def batches() -> Any:
        return chainer.iterators.SerialIterator(list(x), 2, repeat=False, shuffle=False)

    def converted() -> Any:
        return cb.create_mnbn_model(model(), None)

    return {
        cb.MultiNodeBatchNormalization: lambda size=3, comm=None, **options: (
            cb.MultiNodeBatchNormalization(size, comm, **options)
        ),
        cb.create_mnbn_model: partial(_with(cb.create_mnbn_model, link=model), comm=None),
        cb.FinetunePopulationStatistics: _with(
            cb.FinetunePopulationStatistics, iterator=batches, target=model
        ),
        cb.check_sync: _with(cb.check_sync, model=model),
        cb.step_statistics: _with(cb.step_statistics, model=converted),
    }


def _engine() -> dict[Call, Call]:
    state = {"bn/avg_mean": np.zeros(2), "bn/avg_var": np.ones(2)}
    torchs = {"bn.running_mean": np.zeros(2), "bn.running_var": np.ones(2)}

    def convert(**options: Any) -> Any:
        with TemporaryDirectory() as folder:
            np.savez(Path(folder, "a.npz"), **state)  # type: ignore[arg-type]
            return checkpoint.convert(Path(folder, "a.npz"), Path(folder, "b.pt"), **options)

    return {
        Group: lambda parent=None, spec=2: Group(parent, spec),
        as_communicator: lambda obj=None: as_communicator(obj),
        TorchDistributed: TorchDistributed,
        MPI: MPI,
        select_backend: lambda communication_backend="auto": select_backend(
            object, communication_backend
        ),
        checkpoint.convert: convert,
        checkpoint.chainer_to_torch: partial(checkpoint.chainer_to_torch, state),
        checkpoint.torch_to_chainer: partial(checkpoint.torch_to_chainer, torchs),
        checkpoint.pool_states: lambda counts=(1,), **options: checkpoint.pool_states(
            [state], counts, **options
        ),
    }


ROOMS = {
    _torch: ("torch",),
    _trainers: ("torch", "lightning", "mmengine"),
    _reversible: ("torch",),
    _chainer: ("chainer",),
    _engine: ("torch",),
}


@cache
def _calls(room: Callable[[], dict[Call, Call]]) -> dict[Call, Call]:
    require.need(*ROOMS[room])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other packages', of their imports
        return room()


def _build(call: Callable[..., Any], **arguments: Any) -> None:
    result = call(**arguments)
    if isinstance(result, AbstractContextManager):
        result.__enter__()


def _name(built: Callable[..., Any]) -> str:
    return f"{built.__module__.partition('.')[2]}.{built.__name__}"


def _wrong(built: Any) -> Iterator[tuple[str, Any, str]]:
    """Arguments of `built`, values that it must refuse, and a pattern that the error must have."""
    parameters = dict(inspect.signature(built).parameters)
    for name in HANDED_ON.keys() & parameters.keys():
        del parameters[name]
        taker = getattr(tb, HANDED_ON[name])
        parameters = {**inspect.signature(taker).parameters, **parameters}
    for name, own in parameters.items():
        is_bool = own.annotation in (bool, bool | None)
        is_choice = own.annotation in (Weighting, RunningVar, Nonfinite)
        rule = RULES.get(name, BOOL if is_bool else CHOICE if is_choice else None)
        assert rule, (
            f"_RULES, or of an option REFUSED of tests/helpers/spread.py, must say which values of "
            f"`{name}` {_name(built)} refuses"
        )
        if f"{_name(built)}({name}=)" in EXEMPT:
            continue
        takes_none = own.default is None or type(None) in get_args(own.annotation)
        for value in rule.values:
            if value is not None or not takes_none:
                yield name, value, rule.named or f"`{name}`"


@pytest.mark.parametrize("room", ROOMS)
def test_wrong_arguments_are_refused_when_built(room: Callable[[], dict[Call, Call]]) -> None:
    wrong = []
    for built, call in _calls(room).items():
        _build(call)  # the other arguments are valid
        for name, value, named in _wrong(built):
            said = "accepted"
            try:
                _build(call, **{name: value})
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if isinstance(error, (TypeError, ValueError)) and re.search(named, str(error)):
                    continue
            wrong.append(f"{_name(built)}({name}={value!r}): {said}")
    assert not wrong, "\n".join(wrong)


def _options_later() -> Iterator[tuple[Callable[[], Any], Any, Any, dict[str, str]]]:
    """Layers with an input; the attribute that each option has."""
    for built, call in _calls(_torch).items():
        if isinstance(built, type) and issubclass(built, SyncNormBase):
            names = {n: built.Options.attributes.get(n, n) for n in vars(built.Options())}
            ndim = next(int(d) for d in f"{built.__name__}1" if d.isdigit())
            yield call, built, torch.randn(4, 3, *[2] * ndim), names
    calls = _calls(_chainer)
    from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization

    names = {name: LinkOptions.attributes.get(name, name) for name in vars(LinkOptions())}
    x = np.random.default_rng(0).standard_normal((4, 3))
    yield calls[MultiNodeBatchNormalization], MultiNodeBatchNormalization, x, names


# Read when a layer is built alone, or by what holds the layers.
_BUILT_WITH = {"use_gamma", "use_beta", "affine", "bias", "track_running_stats", "num_splits"}


def test_an_option_that_is_set_later_is_refused_by_the_next_call() -> None:
    wrong = []
    for call, built, x, names in _options_later():
        for name, value, named in _wrong(built):
            if name not in names or name in _BUILT_WITH:
                continue
            layer = call()
            for _ in range(2):  # checked, and by a plan
                layer(x)
            owner = layer if hasattr(layer, names[name]) else layer.split_bn
            setattr(owner, names[name], value)
            try:
                layer(x)
                said = "accepted"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if re.search(named, str(error)):
                    continue
            wrong.append(f"{_name(built)}, {name}={value!r}: {said}")
    assert not wrong, "\n".join(wrong)


def test_a_text_is_no_flag() -> None:
    no: Any = "no"
    with pytest.raises(TypeError, match=r"`fuse_relu` must be a bool: got 'no' of type str\.$"):
        tb.SyncBatchNorm(3, fuse_relu=no)
    one: Any = 1  # as torch's layers take it
    true: Any = np.True_
    assert tb.SyncBatchNorm(3, affine=one, fuse_relu=true).weight is not None
