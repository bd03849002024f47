"""A number or a choice that cannot be right is refused when a public object is built.

The table has a row for every public constructor and factory with such arguments: `test_no_row_is_
missing` reads the signatures. An error names the argument, and comes before any data is seen.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest

from tests.helpers import require

require.need("torch")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

nan, inf = math.nan, math.inf


class Wrong(NamedTuple):
    """Values that an argument must refuse, and the words that name the argument."""

    values: tuple[Any, ...]
    named: str = ""  # default: the argument's name in backticks


_NOT_INTS = (2.5, nan, inf, "2", True)
_NOT_NUMBERS = (nan, "0.5", True)
NUMBER = Wrong((*_NOT_NUMBERS, inf, None))
POSITIVE = Wrong((0, -0.5, *NUMBER.values))
EPS = Wrong((1e-40, *POSITIVE.values))  # subnormal in float32
SHARE = Wrong((-0.1, 1.1, *NUMBER.values))  # in [0, 1]
PROBABILITY = Wrong((-0.1, 1.0, *NUMBER.values))  # in [0, 1)
ANY_INT = Wrong((*_NOT_INTS, None))
COUNT = Wrong((-1, *ANY_INT.values))  # from 0
POSITIVE_INT = Wrong((0, *COUNT.values))
CHOICE = Wrong(("nothing", 3, True, None))
PAIR = Wrong(((4,), (0, 8), (4, nan), ("4", 8), (4, True), 4))
SECONDS = Wrong((0, -1.0, nan, "5", True))  # infinity is a hundred million seconds
INTS = Wrong(((0, 1, 1), (1.5, 1, 1), ("1", 1, 1), (True, 1, 1)))  # positive, one for each axis
GROUP = Wrong((0, -1, 2.5, "nothing", True, [0, 0]), "a communicator must|a group must|a list of")


def optional(wrong: Wrong) -> Wrong:
    return wrong._replace(values=tuple(v for v in wrong.values if v is not None))


class Row(NamedTuple):
    """A call with valid arguments, and its arguments that are numbers or choices."""

    call: Callable[..., Any]
    arguments: dict[str, Wrong]


_CONVENTIONS = {"process_group": GROUP, "weighting": CHOICE, "running_var": CHOICE}
_TORCH = {
    "num_features": POSITIVE_INT,
    "eps": EPS,
    "momentum": optional(SHARE),
    **_CONVENTIONS,
}
_PRECISE = {
    "num_samples": optional(POSITIVE_INT),
    "num_iters": optional(POSITIVE_INT),
    "estimator": CHOICE,
}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def _torch() -> dict[Callable[..., Any], Row]:
    from multibn import torch_backend as tb

    naive = {**_TORCH, "num_sync_devices": Wrong((2.5, nan, inf, "2", True))}
    sub = {**_TORCH, "num_splits": POSITIVE_INT}
    x = torch.randn(4, 3)

    def update(**options: Any) -> None:
        options.setdefault("num_iters", 1)
        tb.update_bn_stats(_model(), [x], progress=False, **options)

    return {
        **{
            cls: Row(partial(cls, num_features=3), naive)
            for cls in (tb.NaiveSyncBatchNorm1d, tb.NaiveSyncBatchNorm2d, tb.NaiveSyncBatchNorm3d)
        },
        **{
            cls: Row(partial(cls, num_splits=2, num_features=3), sub)
            for cls in (tb.SubBatchNorm1d, tb.SubBatchNorm2d, tb.SubBatchNorm3d)
        },
        **{
            cls: Row(partial(cls, num_features=3), _TORCH)
            for cls in (
                tb.SyncBatchNorm,
                tb.SyncBatchNorm1d,
                tb.SyncBatchNorm2d,
                tb.SyncBatchNorm3d,
            )
        },
        tb.get_norm: Row(
            partial(tb.get_norm, {"BN": {"NORM_TYPE": "batchnorm"}}),
            {"dim": Wrong((0, 4, -1, *ANY_INT.values))},
        ),
        tb.convert_sync_batchnorm: Row(
            lambda **options: tb.convert_sync_batchnorm(_model(), **options), _CONVENTIONS
        ),
        tb.sync_batch_norm: Row(
            partial(tb.sync_batch_norm, x),
            {"eps": EPS, "process_group": GROUP, "weighting": CHOICE},
        ),
        tb.update_bn_stats: Row(update, {**_PRECISE, "process_group": GROUP}),
        tb.average_gradients: Row(
            partial(tb.average_gradients, _model()), {"process_group": GROUP}
        ),
        tb.check_sync: Row(partial(tb.check_sync, _model()), {"process_group": GROUP}),
        tb.sync_running_stats: Row(
            partial(tb.sync_running_stats, _model()), {"process_group": GROUP, "how": CHOICE}
        ),
        tb.join: Row(partial(tb.join, _model()), {"process_group": GROUP}),
    }


def _trainers() -> dict[Callable[..., Any], Row]:
    from multibn.torch_backend.integrations.lightning import MultiBNLayerSync, PreciseBN
    from multibn.torch_backend.integrations.mmengine import PreciseBNHook

    return {
        MultiBNLayerSync: Row(MultiBNLayerSync, _CONVENTIONS),
        PreciseBN: Row(
            partial(PreciseBN, num_samples=8), {**_PRECISE, "every_n_epochs": POSITIVE_INT}
        ),
        PreciseBNHook: Row(
            PreciseBNHook,
            {
                **_PRECISE,
                "interval": POSITIVE_INT,
                "by_epoch": Wrong(("yes", 2)),
                "mode": Wrong((3, True)),  # a model may have any modes
            },
        ),
    }


def _reversible() -> dict[Callable[..., Any], Row]:
    from multibn.torch_backend import reversible as rev

    x = torch.randn(2, 4)
    blocks: Any = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    after = Wrong(((2,), (-1,), ("1",), (0.5,), (True,)))
    rates = Wrong(((0.1, 1.0), (0.1, -0.5), (0.1, nan), (0.1, "0.1"), (0.1, True), (0.1,)))
    chain = {"drop_path": rates, "buffer_after": after, "mode": CHOICE}
    # Whether there is such a layer is known when the model is built: test_rev_mvit_config.py.
    in_stages = Wrong((((1, 0, 1, 1),), ((1, 2.5, 1, 1),), ((1, "2", 1, 1),), ((-1, 1, 1, 1),)))
    factors = Wrong((((1, 0),), ((1, nan),), ((1, "2"),), ((-1, 2),), ((1.0, 2),)))
    config = {
        **dict.fromkeys(
            ("crop_size", "num_frames", "in_channels", "num_classes", "embed_dim", "num_heads"),
            POSITIVE_INT,
        ),
        "depth": POSITIVE_INT,
        "mlp_ratio": POSITIVE,
        "head_init_scale": NUMBER,
        **dict.fromkeys(("head_dropout_rate", "dropout_rate", "droppath_rate"), PROBABILITY),
        **dict.fromkeys(("head_act", "pool_mode", "res_path", "drop_path_mode"), CHOICE),
        **dict.fromkeys(
            ("patch_kernel", "patch_stride", "pool_kv_stride_adaptive", "pool_kvq_kernel"), INTS
        ),
        "patch_padding": INTS._replace(values=((-1, 1, 1), *INTS.values[1:])),
        **dict.fromkeys(("pool_q_stride", "pool_kv_stride"), in_stages),
        **dict.fromkeys(("dim_mul", "head_mul"), factors),
        **dict.fromkeys(("respath_fuse", "pre_q_fusion"), CHOICE),
        "buffer_layers": Wrong(((-1,), ("1",), (0.5,), (True,))),
    }
    small = rev.RevMViTConfig(depth=1, embed_dim=16)
    named = {"norm": optional(CHOICE), "mode": CHOICE}
    stages = ("dim_mul", "head_mul", "pool_q_stride", "buffer_layers")
    sizes: dict[str, Any] = {
        "depth": 1,
        "embed_dim": 16,
        "num_heads": 1,
        **dict.fromkeys(stages, ()),
    }
    tokens: dict[str, Any] = {"dim": 8, "dim_out": 8, "num_heads": 2, "grid": (1, 2, 2)}
    attention = {
        **dict.fromkeys(("dim", "dim_out", "num_heads"), POSITIVE_INT),
        **dict.fromkeys(("grid", "kernel_q", "stride_q", "kernel_kv", "stride_kv"), INTS),
        "drop_rate": PROBABILITY,
        "pool_mode": CHOICE,
    }
    return {
        rev.ReversibleSequence: Row(partial(rev.ReversibleSequence, blocks), chain),
        rev.reversible: Row(partial(rev.reversible, blocks, x, x), chain),
        rev.RevMViTConfig: Row(rev.RevMViTConfig, config),
        rev.RevMViT: Row(partial(rev.RevMViT, small), named),
        rev.ReversibleMViT: Row(partial(rev.ReversibleMViT, small), named),
        rev.MultiScaleAttention: Row(partial(rev.MultiScaleAttention, **tokens), attention),
        rev.TwoStreamFusion: Row(
            partial(rev.TwoStreamFusion, mode="add", dim=8), {"mode": CHOICE, "dim": POSITIVE_INT}
        ),
        rev.published_rev_mvit: Row(
            partial(rev.published_rev_mvit, name="rev_vit_s", **sizes), {**named, "name": CHOICE}
        ),
    }


def _chainer() -> dict[Callable[..., Any], Row]:
    from multibn import chainer_backend as cb  # noqa: I001  (makes chainer importable)
    import chainer
    import chainer.links as L

    conventions = {
        "weighting": optional(CHOICE),
        "avg_var": optional(CHOICE),
        "conventions": optional(CHOICE),
        "communication_backend": CHOICE,
        "comm": GROUP,
    }
    link = {
        **conventions,
        "size": Wrong((0, -1, 2.5, "2", True, (), (3, 0), (3, 2.0))),
        "axis": Wrong((-1, 2.5, "0", True, (), (0, -1), (2, 0))),
        "decay": SHARE,
        "eps": EPS,
    }
    x = np.ones((4, 3), "f") * np.arange(4, dtype="f")[:, None]
    finetune = {"num_passes": POSITIVE_INT, "comm": GROUP}

    def model() -> Any:
        return chainer.Sequential(L.Linear(3, 3), L.BatchNormalization(3))

    def iterator() -> Any:
        return chainer.iterators.SerialIterator(list(x), 2, repeat=False, shuffle=False)

    return {
        cb.MultiNodeBatchNormalization: Row(
            lambda size=3, comm=None, **options: cb.MultiNodeBatchNormalization(
                size, comm, **options
            ),
            link,
        ),
        cb.multi_node_batch_normalization: Row(
            partial(cb.multi_node_batch_normalization, x),
            {"eps": EPS, "weighting": CHOICE, "comm": GROUP, "axis": link["axis"]},
        ),
        cb.create_mnbn_model: Row(
            lambda comm=None, **options: cb.create_mnbn_model(model(), comm, **options),
            conventions,
        ),
        cb.FinetunePopulationStatistics: Row(
            lambda **options: cb.FinetunePopulationStatistics(iterator(), model(), **options),
            finetune,
        ),
        cb.finetune_population_statistics: Row(
            lambda **options: cb.finetune_population_statistics(
                iterator(), model(), progress=False, **options
            ),
            finetune,
        ),
        cb.check_sync: Row(partial(cb.check_sync, model()), {"comm": GROUP}),
    }


def _engine() -> dict[Callable[..., Any], Row]:
    from multibn import Group, as_communicator, checkpoint
    from multibn.communicators.transports.chainermn import select_backend
    from multibn.communicators.transports.mpi import MPI
    from multibn.communicators.transports.torch_distributed import TorchDistributed

    counts = {"num_batches_tracked": COUNT, "avg_var_count": PAIR}
    state = {"bn/avg_mean": np.zeros(2), "bn/avg_var": np.ones(2)}
    torchs = {"bn.running_mean": np.zeros(2), "bn.running_var": np.ones(2)}

    def convert(**options: Any) -> Any:
        from pathlib import Path
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            np.savez(Path(folder, "a.npz"), **state)  # type: ignore[arg-type]
            return checkpoint.convert(Path(folder, "a.npz"), Path(folder, "b.pt"), **options)

    return {
        Group: Row(
            lambda parent=None, spec=2: Group(parent, spec),
            {"spec": Wrong((None, *GROUP.values), GROUP.named), "parent": GROUP},
        ),
        as_communicator: Row(lambda obj=None: as_communicator(obj), {"obj": GROUP}),
        TorchDistributed: Row(TorchDistributed, {"timeout": SECONDS}),
        MPI: Row(MPI, {"timeout": SECONDS}),
        select_backend: Row(
            lambda communication_backend="auto": select_backend(object, communication_backend),
            {"communication_backend": CHOICE},
        ),
        checkpoint.convert: Row(convert, counts),
        checkpoint.chainer_to_torch: Row(partial(checkpoint.chainer_to_torch, state), counts),
        checkpoint.torch_to_chainer: Row(
            partial(checkpoint.torch_to_chainer, torchs), {"avg_var_count": PAIR}
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
def _table(room: Callable[[], dict[Callable[..., Any], Row]]) -> dict[Callable[..., Any], Row]:
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


@pytest.mark.parametrize("room", ROOMS)
def test_refused(room: Callable[[], dict[Callable[..., Any], Row]]) -> None:
    wrong = []
    for built, row in _table(room).items():
        _build(row.call)  # the other arguments are valid
        for name, (values, named) in row.arguments.items():
            for value in values:
                call = f"{_name(built)}({name}={value!r})"
                try:
                    _build(row.call, **{name: value})
                except (TypeError, ValueError) as error:
                    if not re.search(named or f"`{name}`", str(error)):
                        wrong.append(f"{call}: {type(error).__name__}: {error}")
                except Exception as error:
                    wrong.append(f"{call}: {type(error).__name__}: {error}")
                else:
                    wrong.append(f"{call} is accepted")
    assert not wrong, "\n".join(wrong)


# Their numbers and choices are in the table under other names, or there are none to check.
EXEMPT = {
    **dict.fromkeys(
        ("Moments", "BatchStatistics", "GradientSums", "Converted"),
        "results, which users read",
    ),
    **dict.fromkeys(
        (
            "aggregate", "backward_sums", "batch_statistics", "input_gradient", "normalize",
            "local_moments", "running_variance", "update_running",
        ),
        "functions of arrays: nothing is built, and each training step calls them",
    ),
    "BatchNorm": "the constructor is that of torch's batch norms",
    "ChainerMN": "`select_backend` and `timeout`, in the rows of `select_backend` and `MPI`",
    "NCCL": "needs a GPU; test_nccl.py has its `unique_id`",
    "allreduce": "a function of arrays",
    "register_allreduce_hook": "takes DistributedDataParallel, which needs ranks",
    **dict.fromkeys(("find_comm", "restore"), "takes ranks that a communicator has"),
    "torch_backend.reversible.mvit.config.RevMViTConfig(norm=)": "for the model to check",
    "communicators.transports.mpi.MPI(comm=)": "looking at it initialises MPI",
    "load_names": "a file's name",
}  # fmt: skip
PACKAGES = (
    "multibn",
    "multibn.communicators",
    "multibn.torch_backend",
    "multibn.torch_backend.reversible",
    "multibn.chainer_backend",
    "multibn.checkpoint",
)
MODULES = (
    "multibn.communicators.transports.chainermn",
    "multibn.communicators.transports.mpi",
    "multibn.communicators.transports.nccl",
    "multibn.communicators.transports.torch_distributed",
    "multibn.torch_backend.integrations.lightning",
    "multibn.torch_backend.integrations.mmengine",
)
_RANKS = ("process_group", "comm", "parent", "spec", "obj")
_TEXTS = ("prefix", "src", "dst", "ignore")


def _public() -> Iterator[Any]:
    for name in (*PACKAGES, *MODULES):
        for key, value in vars(import_module(name)).items():
            home = getattr(value, "__module__", None) or ""
            here = home.startswith(name) if name in PACKAGES else home == name
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if callable(value) and here and not key.startswith("_") and not is_error:
                yield value


def _is_checkable(hint: Any) -> bool:
    """Whether a type is, or contains, a number, a text or a choice of words."""
    origin = get_origin(hint)
    if origin is Literal or hint in (int, float, str):
        return True
    if inspect.isclass(origin) and issubclass(origin, Mapping | Callable):
        return False
    return any(map(_is_checkable, get_args(hint)))


def _checkable(built: Any) -> set[str]:
    """The arguments that name ranks, or are numbers or choices."""
    return {
        name
        for name, parameter in inspect.signature(built).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (name in _RANKS or (name not in _TEXTS and _is_checkable(parameter.annotation)))
    }


def test_no_row_is_missing() -> None:
    table = {built: row for room in ROOMS for built, row in _table(room).items()}
    missing = []
    for built in _public():
        if built.__name__ not in EXEMPT and not getattr(built, "_is_protocol", False):
            known = table[built].arguments if built in table else {}
            missing += [f"{_name(built)}({name}=)" for name in _checkable(built) - known.keys()]
    missing = [name for name in missing if name not in EXEMPT]
    assert not missing, missing
