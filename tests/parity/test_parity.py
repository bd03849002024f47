"""The parity command's parts: cases, oracle, comparison, table, exit status."""

import atexit
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn import SingleProcess, cli
from multibn.chainer_backend import MultiNodeBatchNormalization
from multibn.engine.recompute import replaying
from multibn.options import NormOptions
from multibn.parity import cases, command, oracle, pair, worker
from multibn.parity import launch as _launch
from multibn.parity.cases import BOUNDS, CASES, Case
from multibn.parity.launch import WorkerError
from multibn.parity.worker import Error
from multibn.torch_backend.layer.base import LayerOptions
from tests.helpers import launch, models, require
from tests.helpers.spread import OTHERS

from chainer import links as L  # isort: skip

NEEDS = "torch chainer"

UNEVEN = next(case for case in CASES if case.name == "uneven")


def test_cases_are_selected_by_patterns() -> None:
    assert cases.select(["*"]) == CASES
    assert [case.name for case in cases.select(["mean-1e4", "mean-100"])] == [
        "mean-100",
        "mean-1e4",
    ]
    with pytest.raises(ValueError, match=r"must match the name of a case: got 'nothing'\. Run mu"):
        cases.select(["mean-100", "nothing"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_fit_their_case_and_are_repeatable(case: Case) -> None:
    for size in (1, 4):
        xs, dys, masks = case.batches(size, step=0)
        assert masks[0][0].all()  # no batch without an element that counts
        for x, dy in zip(xs, dys, strict=True):
            assert x.shape == dy.shape
            assert x.dtype == dy.dtype == np.dtype(case.dtype)
            if case.layout == "channels_last":
                assert np.moveaxis(x, 1, -1).flags.c_contiguous
        assert [len(x) for x in xs].count(0) == (case.split == "empty" and size > 1)
        again, *_ = case.batches(size, step=0)
        other, *_ = case.batches(size, step=1)
        for x, same in zip(xs, again, strict=True):
            np.testing.assert_array_equal(x, same)  # NaN where a mask hides it
        assert not np.array_equal(xs[0], other[0])


@pytest.mark.parametrize("quantity", list(BOUNDS["float32"]))
@pytest.mark.parametrize("by", [1e-3, np.nan])
@pytest.mark.parametrize("adapter", ["torch", "chainer"])
def test_a_broken_adapter_is_found(adapter: str, quantity: str, by: float) -> None:
    arrays = worker.train(adapter, UNEVEN, SingleProcess())
    (key,) = [key for key in arrays if key.endswith(f"{UNEVEN.steps - 1}/{quantity}")]
    arrays[key] = arrays[key] + by
    worst = max(worker.compare(adapter, UNEVEN, arrays, 0, 1))
    assert worst.ratio > 1
    assert (worst.case, worst.quantity, worst.adapter) == ("uneven", quantity, adapter)


def verdicts_of(monkeypatch: Any, errors: Sequence[Error], absent: str = "") -> list[str]:
    """The verdicts of a launch on one rank that has found `errors`."""
    monkeypatch.setattr(command, "importable", lambda name: name != absent)
    monkeypatch.setattr(command, "find_command", lambda name: None)

    def run_workers(*_: Any, **options: Any) -> Any:
        if not errors:
            raise WorkerError("name", "ValueError: no", "")
        return [errors]

    monkeypatch.setattr(command, "run_workers", run_workers)
    return command.launch("gloo", 2, ["torch", "chainer"])


def test_the_outcome_is_the_worst_that_a_launch_has(monkeypatch: Any, capsys: Any) -> None:
    one, other = (Error(0.5, 1e-7, 2e-7, "y", "uneven", name) for name in ("torch", "chainer"))
    missing = verdicts_of(monkeypatch, [one], "chainer")
    assert missing == ["ok", "not run"]
    assert command.exit_status(missing) == 0
    assert command.exit_status(missing[1:]) == 2
    capsys.readouterr()
    failed = verdicts_of(monkeypatch, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line[28:] for line in lines] == ["failed: ValueError: no"] * 2
    assert command.exit_status(missing + failed) == 2
    broken = verdicts_of(monkeypatch, [one, other._replace(ratio=1.1)])
    assert broken == ["ok", "BROKEN"]
    assert command.exit_status(failed + broken) == 1


def test_the_worst_of_each_broken_case_is_named(monkeypatch: Any, capsys: Any) -> None:
    errors = [
        Error(error, error, 1.0, quantity, "uneven", "torch")
        for error, quantity in ((2.0, "dx"), (9.0, "y"), (3.0, "eval"), (0.5, "dbias"))
    ]
    verdicts_of(monkeypatch, [*errors, Error(10.0, 1e-3, 1e-4, "y", "masked", "torch")], "chainer")
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "    uneven: 9e+00 in y, bound 1e+00",
        "    masked: 1e-03 in y, bound 1e-04",
    ]


def test_what_cannot_run_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: name != "chainer")
    monkeypatch.setattr(command, "find_command", lambda name: None)
    assert command.missing("torch", "gloo") == command.missing("torch", "single process") == ""
    assert command.missing("torch", "mpi") == "no mpiexec on PATH"
    reason = "chainer is not installed; no mpiexec on PATH"
    assert command.missing("torch", "chainermn naive") == reason
    assert command.missing("models", "gloo") == ""


def test_where_nothing_can_run_the_exit_status_is_2(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "importable", lambda name: False)
    for count, arguments in ((9, ["--ranks", "1"]), (1, ["--model", "no:pair"])):
        assert cli.main(["parity", *arguments]) == 2
        assert capsys.readouterr().out.endswith(f"\n{count} not run\n")


def test_ranks_that_no_machine_has_are_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: ["ok"])
    for number in (-1, 0, 1025, 9999999):
        assert cli.main(["parity", "--ranks", "2", str(number)]) == 2
        said = f"multibn parity: --ranks must be from 1 to 1024: got {number}.\n"
        assert capsys.readouterr().err == said


def test_a_shape_that_differs_is_an_infinite_error() -> None:
    assert oracle.relative_error(np.ones(3), np.ones(4), np.ones(4)) == np.inf
    assert oracle.relative_error(np.ones((0, 3)), np.ones((0, 3)), np.ones((0, 3))) == 0


def test_the_table_fits_80_columns(monkeypatch: Any, capsys: Any) -> None:
    """The names of the case and of the quantity that failed stand in it."""
    case = max((case.name for case in cases.CASES), key=len)
    adapters = "numpy", "torch", "chainer", "flax"
    errors = [Error(np.inf, np.inf, 1e-6, "running_mean", case, each) for each in adapters]
    monkeypatch.setattr(command, "missing", lambda adapter, over: "")
    monkeypatch.setattr(command, "run_workers", lambda *_, **__: [errors])
    monkeypatch.setattr(command, "LAUNCHERS", {"chainermn naive": "mpiexec"})
    assert cli.main(["parity", "--ranks", "16", "--cases", case]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Each row shows the largest error relative to its bound."
    header, first = (line.index for line in lines[1:3])
    assert header("error of quantity, in case") == first("  inf running_mean")
    assert lines[2].split()[-4:] == ["inf", "running_mean,", case, "BROKEN"]


def test_a_case_of_recomputation_runs_each_step_again(monkeypatch: Any) -> None:
    """`helpers.parity` finds one message more in Chainer."""
    again: list[Any] = []
    following = replaying.next

    def noted(self: replaying, shape: Any) -> Any:
        again.append(shape)
        return following(self, shape)

    monkeypatch.setattr(replaying, "next", noted)
    for name, count in (("float32", 0), ("recompute", 3)):
        (case,) = cases.select([name])
        worker.train("torch", case, SingleProcess())
        assert len(again) == count


def ends_badly(_: Any) -> None:
    """A rank that has a result, and fails after writing it."""
    atexit.register(os._exit, 3)


def test_ranks_that_fail_or_hang_are_errors() -> None:
    function = "multibn.parity.worker.measure"
    start = partial(_launch.run_workers, function, "single process", 1, cases=["float32"])
    with pytest.raises(WorkerError, match=r"1 rank\(s\): KeyError: 'no such adapter'") as raised:
        start(timeout=60, adapters=["no such adapter"])
    assert "Traceback" in raised.value.output
    with pytest.raises(WorkerError, match="exit status 1, results of 0 of 1 ranks"):
        _launch.run_workers("sys.exit", "single process", 1, timeout=60)
    with pytest.raises(WorkerError, match="exit status 3, results of 1 of 1 ranks"):
        _launch.run_workers(f"{__name__}.ends_badly", "single process", 1, timeout=60)
    with pytest.raises(WorkerError, match=r"1 rank\(s\): no result within 0.02 s"):
        start(timeout=0.02, adapters=["torch"])


def test_ranks_find_the_users_modules(monkeypatch: Any) -> None:
    """Those in the working directory, and on the PYTHONPATH of the command."""
    package = str(launch.ROOT)
    monkeypatch.setattr(_launch.os, "getcwd", lambda: "/here")
    monkeypatch.setenv("PYTHONPATH", "/there")
    assert _launch.environment()["PYTHONPATH"] == f"{package}:/here:/there"
    monkeypatch.delenv("PYTHONPATH")
    assert _launch.environment()["PYTHONPATH"] == f"{package}:/here"


def unlike(layer: str = "fc") -> Any:
    """A pair of which one gives other numbers, from a layer on."""
    torch_model, chainer_model, x = models.pair()
    torch_model.get_submodule(layer).register_forward_hook(lambda module, args, y: 1.5 * y)
    return torch_model, chainer_model, x


UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"momentum": None}, {}, "momentum (1 - decay) is None in torch, 0.1 in Chainer"),
    ({}, {"decay": 0.99}, "momentum (1 - decay) is 0.1 in torch, 0.01 in Chainer"),
    ({"affine": False}, {"use_beta": False}, "affine (gamma) is False in torch, True in Chainer"),
    ({}, {"use_beta": False}, "bias (beta) is True in torch, False in Chainer"),
    ({}, {"comm": None, "avg_var": "biased"}, "running_var (avg_var) is unbiased_global in torch, "
     "biased in Chainer"),
]  # fmt: skip
# One model may have the ReLU behind the layer; the others have no word of Chainer's.
APART = {"fuse_relu", "track_running_stats", "num_splits"}
for name, default in vars(NormOptions()).items():
    text = f"{name} is {default} in torch, {OTHERS[name][0]} in Chainer"
    UNLIKE += [({}, {"comm": None, name: OTHERS[name][0]}, text)] * (name not in APART)


def test_each_option_of_a_layer_is_compared() -> None:
    missing = vars(LayerOptions()).keys() - {text.split()[0] for *_, text in UNLIKE} - APART
    assert not missing, (
        f"`_option_differences` of parity/pair.py, and UNLIKE here, must have {missing}"
    )


@pytest.mark.parametrize("of_torch, of_chainer, text", UNLIKE)
def test_options_that_differ_are_named_before_any_number(
    of_torch: Any, of_chainer: Any, text: str, monkeypatch: Any, capsys: Any
) -> None:
    make = MultiNodeBatchNormalization if "comm" in of_chainer else L.BatchNormalization
    torch_model, chainer_model, x = models.pair()
    torch_model.bn = nn.BatchNorm2d(4, **of_torch)
    del chainer_model.bn
    with chainer_model.init_scope():
        chainer_model.bn = make(4, **{"eps": 1e-5} | of_chainer)
    monkeypatch.setattr(models, "pair", lambda: (torch_model, chainer_model, x))
    found = pair.compare_models(SingleProcess(), PAIR)
    assert [e.text for e in found] == [text]
    assert verdicts_of(monkeypatch, [e._replace(adapter="torch") for e in found], "chainer")[0] == (
        "BROKEN"
    )
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r".*     - [a-z].*, bn +BROKEN$", lines[0])
    assert lines[1] == f"    bn: {text}"


PAIR = "tests.helpers.models:pair"


def fails(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def changed(change: Callable[[Any, Any], object]) -> Callable[..., Any]:
    """The pair, whose models are changed."""
    return lambda t, c, x: (change(t, c), (t, c, x))[1]


def _scripted(torch_model: Any, chainer_model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit in newer torch
        torch_model.bn = torch.jit.script(torch_model.bn)


class Norm(L.BatchNormalization):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


def _with_chainermns_link(torch_model: Any, chainer_model: Any) -> None:
    from chainermn.links import MultiNodeBatchNormalization

    with pytest.warns(FutureWarning), chainer_model.init_scope():
        chainer_model.norm = MultiNodeBatchNormalization(4, None)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda *_: None, "must return two of .*, a chainer.Link and a .* NumPy array: got NoneT"),
        (lambda *pair: pair[:2], r"and a NumPy array: got TorchModel, ChainerModel\."),
        (lambda t, c, x: (c, t, x), r"array: got ChainerModel, TorchModel, ndarray\."),
        (lambda t, c, x: (t, c, x.astype(int)),
         r"input of tests\.helpers\.models:pair must be .* float64, .*: got int64 of shape \(5, "),
        (lambda t, c, x: (t, c, x[:2]), r"3 or more samples: got float32 of shape \(2, 3, 8, 8\)"),
        (lambda t, c, x: (t, c, np.array(x.sum())), r"more samples: got float32 of shape \(\)\.$"),
        (lambda t, c, x: (t, c, x.astype("float64")),
         r"the torch model of .* must accept the example input, float64 of shape \(5, 3, 8, 8\), "
         "and return an array .*: got RuntimeError: Input type"),
        (fails(KeyError("no data")),
         r"models:pair raised KeyError: 'no data' \(.*test_parity\.py, line \d+\)"),
        (fails(SystemExit()), r"models:pair raised SystemExit:  \(.*, line \d+\)"),
        (changed(lambda t, c: t.register_forward_hook(fails(SystemExit()))),
         r"the torch model .* and return an array .*: got SystemExit: $"),
        (changed(_scripted), r"must have layers that can .*: 1 .* synchronized: bn \(torch\.jit"),
        (changed(lambda t, c: setattr(c.bn, "__class__", Norm)),
         r"must have layers that can be .*: 1 .* will not be synchronized: /bn \(.*Norm: its cl"),
        (lambda t, c, x: (t, L.Classifier(c), x), r"the Chainer model .* a loss: got TypeError: "),
        (changed(lambda t, c: t.register_forward_hook(lambda module, args, y: y.sum())),
         r"the torch model .* an array whose first axis is the batch, .*: got shape \(\)\.$"),
        (changed(lambda t, c: setattr(t, "fc", nn.Linear(4, 3))),
         "of the same names and sizes: Error.* size mismatch for fc.weight"),
        (changed(_with_chainermns_link), "converts: got MultiNodeBatchNormalization of chainermn"),
    ],
)  # fmt: skip
def test_a_wrong_pair_is_refused(change: Any, message: str, monkeypatch: Any, capsys: Any) -> None:
    made = models.pair()
    monkeypatch.setattr(models, "pair", lambda: change(*made))
    monkeypatch.setattr(command, "run_workers", None)
    assert cli.main(["parity", "--model", PAIR]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)


def test_links_beside_one_that_shares_already_are_converted(monkeypatch: Any) -> None:
    made = torch_model, chainer_model, _ = models.pair()
    torch_model.shared = nn.BatchNorm2d(4)
    with chainer_model.init_scope():
        chainer_model.shared = MultiNodeBatchNormalization(4, None, eps=1e-5)
    monkeypatch.setattr(models, "pair", lambda: made)
    _, converted, _, errors = pair.load_pair(PAIR, SingleProcess())
    kinds = {type(link) for link in (converted.link.bn, converted.link.shared)}
    assert (kinds, errors) == ({MultiNodeBatchNormalization}, [])


@pytest.mark.parametrize("linen", ["", "linen_"])
@pytest.mark.parametrize("function, other", [("pair", "torch"), ("chainer_pair", "chainer")])
def test_a_model_of_flax_is_compared_with_any_other(linen: str, function: str, other: str) -> None:
    require.need("flax")
    errors = pair.compare_models(SingleProcess(), f"tests.parity.flax_models:{linen}{function}")
    assert max(e.ratio for e in errors) < 1
    assert [e.case for e in errors] == 3 * [
        f"{other} and flax alone",
        f"{other} alone and on ranks",
    ]


@pytest.mark.parametrize("linen", ["", "linen_"])
def test_the_layer_and_the_options_in_which_a_model_of_flax_differs_are_named(linen: str) -> None:
    require.need("flax")
    path = f"tests.parity.flax_models:{linen}"
    found = pair.compare_models(SingleProcess(), f"{path}of_other_options")
    assert [e.text for e in found] == [
        "eps is 1e-05 in torch, 0.001 in flax",
        "momentum (1 - decay) is 0.1 in torch, 0.01 in flax",
        "bias (beta) is True in torch, False in flax",
        "running_var (avg_var) is unbiased_global in torch, biased in flax",
    ]
    found = pair.compare_models(SingleProcess(), f"{path}unlike")
    assert {e.layer for e in found if e.ratio > 1 and "alone" in e.case} == {"fc"}


def test_two_models_of_flax_are_no_pair() -> None:
    require.need("flax")
    match = r"two of .* and a Module of flax\.nnx or flax\.linen, .*: got FlaxModel, LinenModel"
    with pytest.raises(ValueError, match=match):
        pair.load_pair("tests.parity.flax_models:of_two_kinds")


def test_a_rank_without_a_sample_is_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "run_workers", None)
    assert cli.main(["parity", "--model", PAIR, "--ranks", "2", "6"]) == 2
    said = f"--ranks must be from 1 to 5, the samples of the example input of {PAIR}: got 6.\n"
    assert capsys.readouterr().err == f"multibn parity: {said}"


def unlike_from_bn() -> Any:
    return unlike("bn")


@pytest.mark.parametrize("name, layer", [("unlike", "fc"), ("unlike_from_bn", "bn")])
def test_a_pair_that_differs_is_found(name: str, layer: str) -> None:
    errors = pair.compare_models(SingleProcess(), f"{__name__}:{name}")
    alike = {f"{framework} alone and on ranks" for framework in ("torch", "chainer")}
    assert {e.case for e in errors if e.ratio <= 1} == alike
    assert {(e.layer, e.case in alike) for e in errors} == {(layer, False), ("", True)}
    assert f"; the first layer whose output differs is {layer}" in command.judge(errors)[1]
    assert {(e.case, e.quantity) for e in errors if e.ratio > 1} == {
        (f"torch and chainer {where}", quantity)
        for where in ("alone", "on ranks")
        for quantity in ("y", "dx", "eval")
    }
