"""Models that were trained apart, pooled without a message between them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn import cli
from multibn.checkpoint import CheckpointError, files, pool_states
from tests.helpers.ranks import run_ranks

pytest.importorskip("safetensors")

import torch
from torch import nn

from multibn.torch_backend import sync_running_stats
from tests.checkpoint import test_files as plain

NEEDS = "torch"

C = 3
COUNTS = (7, 20, 400)


def data() -> list[Any]:
    """Samples of sites that differ."""
    rng = np.random.default_rng(0)
    return [rng.normal(3 * i, 1 + i, (count, C)) for i, count in enumerate(COUNTS)]


def state(mean: Any, var: Any, framework: str, counter: int = 0) -> dict[str, Any]:
    """A batch normalization inside of a model, beside an array that all models share."""
    if framework == "chainer":
        one, shared = {"avg_mean": mean, "avg_var": var, "N": np.asarray(counter)}, np.eye(2)
        return {f"bn/{name}": a for name, a in one.items()} | {"fc/W": shared}
    one = {"running_mean": mean, "running_var": var, "num_batches_tracked": np.asarray(counter)}
    arrays = {f"bn.{name}": a for name, a in one.items()} | {"fc.weight": np.eye(2)}
    return {name: torch.from_numpy(a) for name, a in arrays.items()}


def states(framework: str) -> list[dict[str, Any]]:
    return [state(x.mean(0), x.var(0), framework, i) for i, x in enumerate(data())]


@pytest.mark.parametrize("framework", ["chainer", "torch"])
def test_the_pool_has_the_statistics_of_all_data(framework: str) -> None:
    pool = pool_states(states(framework), COUNTS)
    mean, var, counter, shared = map(np.asarray, pool.values())
    whole = np.concatenate(data())
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(var, whole.var(0), rtol=1e-12)
    assert list(pool) == list(states(framework)[0])
    assert counter == 0  # the first state's
    np.testing.assert_array_equal(shared, np.eye(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_counts_are_as_many_ranks_to_the_last_bit(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.BatchNorm2d(C), nn.BatchNorm1d(2)).to(dtype) for _ in range(size)]
    layers: list[Any] = [layer for model in models for layer in model]
    for layer in layers:
        nn.init.normal_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.1, 3)
    apart = [{name: t.clone() for name, t in m.state_dict().items()} for m in models]
    run_ranks(size, lambda rank: sync_running_stats(models[rank.rank], rank, how="pool"))
    pool = pool_states(apart, [0.3] * size)
    for name, t in models[0].state_dict().items():
        assert pool[name].dtype == t.dtype
        assert torch.equal(pool[name], t), name


@pytest.mark.parametrize("framework", ["chainer", "torch"])
def test_parameters_are_averaged_on_request_only(framework: str) -> None:
    apart = states(framework)
    key = list(apart[0])[-1]
    apart[1][key] = apart[1][key] + 1
    with pytest.raises(CheckpointError, match=f"states differ in '{key}', but only running stat"):
        pool_states(apart, COUNTS)
    pool = pool_states(apart, COUNTS, average_parameters=True)
    expected = np.eye(2) + COUNTS[1] / sum(COUNTS)
    np.testing.assert_allclose(np.asarray(pool[key]), expected, rtol=1e-12)
    assert int(pool[list(pool)[2]]) == 0  # a counter


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("framework", ["chainer", "torch"])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_counters_of_other_states_have_any_form(first: int, framework: str, average: bool) -> None:
    """torch loads a counter of another shape or dtype, and a state without one."""
    apart = states(framework) + states(framework)[:1]
    counter = list(apart[0])[2]
    kind: Any = np.asarray if framework == "chainer" else torch.tensor
    apart[1][counter], apart[2][counter] = kind([7]), kind(7.5)
    del apart[3][counter]
    rotated = [*apart[first:], *apart[:first]]
    pooled = pool_states(rotated, [1] * 4, average_parameters=average)
    assert pooled.keys() == rotated[0].keys()
    assert first == 3 or pooled[counter] is rotated[0][counter]


@pytest.mark.parametrize("mean", [1e-1, 1e8])
def test_a_large_mean_costs_no_digit_of_the_variance(mean: float) -> None:
    sites = [state(np.full(C, mean + i), np.full(C, 0.5), "chainer") for i in (-1, 0, 1)]
    np.testing.assert_allclose(pool_states(sites, [1, 2, 1])["bn/avg_var"], 1.0, rtol=1e-12)


def test_the_first_count_may_be_next_to_nothing() -> None:
    pooled = pool_states(states("chainer"), [5e-324, 1, 5e-324])
    np.testing.assert_array_equal(pooled["bn/avg_var"], states("chainer")[1]["bn/avg_var"])


def test_integers_are_never_averaged() -> None:
    with pytest.raises(CheckpointError, match=r"states differ in 'steps', .* Leave these arrays"):
        pool_states([{"steps": np.asarray(i)} for i in (1, 3)], [1, 1], average_parameters=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": np.zeros(2)},
         r"have 'x', with the .*: got none in states\[0\] and \(2,\) float64 in st.*\[1"),
        ({"bn/avg_var": None}, r"'bn/avg_var', .* got \(3,\) float64 in states\[0\] and none in "),
        ({"bn/avg_mean": np.zeros(4)}, r"'bn/avg_mean', .* and \(4,\) float64 in states\[1\]\. P"),
        ({"bn/avg_mean": np.zeros(3, "f4")}, r"same shape and dtype: .* and \(3,\) float32 in sta"),
    ],
)  # fmt: skip
def test_states_of_unlike_models_are_refused(change: dict[str, Any], message: str) -> None:
    apart = states("chainer")
    changed = {key: a for key, a in (apart[1] | change).items() if a is not None}
    with pytest.raises(CheckpointError, match=message):
        pool_states([apart[0], changed, apart[2]], COUNTS)


def test_a_mean_and_a_variance_of_other_shapes_are_no_statistics() -> None:
    odd = [state(np.zeros(1), np.full(C, i), "chainer") for i in range(2)]
    with pytest.raises(CheckpointError, match="states differ in 'bn/avg_var', but only running"):
        pool_states(odd, [1, 1])


@pytest.mark.parametrize(
    "counts, message",
    [
        ([1, 2], "`states` and `counts` must have the same length, at least 1: got 3 and 2"),
        ([1, 2, 0], "`counts` must be positive and finite: got 0"),
        ([1, 2, float("inf")], "`counts` must be positive and finite: got inf"),
        ([1, 2, "3"], "`counts` must be a number: got '3' of type str"),
    ],
)
def test_wrong_counts_are_refused(counts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pool_states(states("torch"), counts)
    with pytest.raises(ValueError, match="same length, at least 1: got 0 and 0"):
        pool_states([], [])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda s: [list(one.values()) for one in s],
         r"list in the list\. Convert a list of arrays"),
        (lambda s: dict(enumerate(s)), "got dict. Convert"),
        (iter, "got list_iterator. Conv"),
    ],
)  # fmt: skip
def test_states_that_are_no_list_of_dicts_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=r"`states` must be a list of dicts that map .*" + message):
        pool_states(make(states("torch")), COUNTS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("number, average", [(0, False), (1, False), (-1, True)])
def test_a_state_that_is_not_finite_is_refused_by_name(
    number: int, average: bool, value: float, tmp_path: Path, capsys: Any
) -> None:
    apart = states("chainer")
    key = list(apart[1])[number]
    apart[1][key] = np.full_like(apart[1][key], value)
    with pytest.raises(FloatingPointError, match=rf"'{key}' must be .* infinity in states\[1\]"):
        pool_states(apart, COUNTS, average_parameters=average)
    paths = [
        plain.make(tmp_path / f"{name}.npz", one) for name, one in zip("abc", apart, strict=True)
    ]
    command = ["pool", *map(str, paths), "-o", str(tmp_path / "dst.npz"), "--counts", "1", "2", "3"]
    assert cli.main(command + ["--average-parameters"] * average) == 2
    assert f"NaN or infinity in {paths[1]}. Leave" in capsys.readouterr().err


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "mean, var",
    [
        ("bn/moving_mean", "bn/moving_variance"),  # Keras
        ("bn._mean", "bn._variance"),  # Paddle
        ("bn/~/mean_ema/average", "bn/~/var_ema/average"),  # Haiku
        ("batch_stats/bn/mean", "batch_stats/bn/var"),  # flax
        ("bn.mean", "bn.var"),  # flax, beside the parameters of the layer
        ("bn.regular_running_mean", "bn.regular_running_var"),  # escnn
        ("running_mean", "running_var"),
    ],
)
def test_statistics_are_known_by_each_frameworks_names(mean: str, var: str, average: bool) -> None:
    """The mean of the variances would be 1."""
    apart = [{mean: np.full(2, m), var: np.ones(2), "bn.scale": np.ones(2)} for m in (0.0, 8.0)]
    pooled = pool_states(apart, [1, 1], average_parameters=average)
    assert pooled[mean].tolist() == [4, 4]
    assert pooled[var].tolist() == [17, 17]


@pytest.mark.parametrize("names", [("mean", "var"), ("a.posterior_mean", "a.posterior_variance")])
def test_parameters_of_other_models_are_no_statistics(names: tuple[str, str]) -> None:
    apart = [dict(zip(names, np.full((2, 3), m), strict=True)) for m in (0.0, 8.0)]
    assert pool_states(apart, [1, 1], average_parameters=True)[names[1]].tolist() == [4] * 3
    with pytest.raises(CheckpointError, match=", rename running statistics to running_mean and"):
        pool_states(apart, [1, 1])


def test_named_instance_norms_have_the_mean_of_the_variances(tmp_path: Path, capsys: Any) -> None:
    """All data in one process give the same running statistics."""
    torch.manual_seed(0)
    data = torch.randn(8, C, 5, 5) + 6 * torch.arange(8)[:, None, None, None]

    def trained(x: Any) -> dict[str, Any]:
        norms = (nn.InstanceNorm2d(C, track_running_stats=True, momentum=1), nn.BatchNorm2d(C))
        model = nn.ModuleDict(dict(zip(("in", "bn"), norms, strict=True)))
        for norm in norms:
            norm(x)
        return model.state_dict()

    expected = trained(data)["in.running_var"]
    apart = [trained(data[:2]), trained(data[2:])]
    for names in (["in"], ["i*", "in"], "in"):
        pooled = pool_states(apart, [2, 6], instance_norms=names)
        torch.testing.assert_close(pooled["in.running_var"], expected)
        for key in ("in.running_mean", "bn.running_var"):
            assert torch.equal(pooled[key], pool_states(apart, [2, 6])[key])
    with pytest.raises(ValueError, match=r"must match layers .*: got 'out', but found 'in', 'bn'"):
        pool_states(apart, [2, 6], instance_norms=["in", "out"])
    paths = [str(plain.make(tmp_path / f"{i}.pt", one)) for i, one in enumerate(apart)]
    command = ["pool", *paths, "-o", str(tmp_path / "c.pt"), "--counts", "2", "6"]
    assert cli.main([*command, "--instance-norms", "in"]) == 0
    written = files.read(tmp_path / "c.pt", "")
    torch.testing.assert_close(written["in.running_var"], expected)
    assert cli.main([*command, "--instance-norms", "out"]) == 2
    assert "got 'out', but found 'in', 'bn'" in capsys.readouterr().err


def test_a_negative_variance_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    """A server's Adam makes one, and the mean with others hides it; a mean may be negative."""
    for framework, key in (("torch", "bn.running_var"), ("chainer", "bn/avg_var")):
        apart = states(framework)
        apart[1][key][0] = -0.2
        found = rf"^'{key}' is a variance and must not be negative: got -0.2 in states\[1\]\. L"
        with pytest.raises(FloatingPointError, match=found):
            pool_states(apart, COUNTS, average_parameters=framework == "torch")
    paths = [str(plain.make(tmp_path / f"{i}.npz", one)) for i, one in enumerate(apart)]
    command = ["pool", *paths, "-o", str(tmp_path / "c.npz"), "--counts", "1", "2", "3"]
    assert cli.main(command) == 2
    assert f"'bn/avg_var' is a variance and must not be negative: got -0.2 in {paths[1]}. L" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_pooled_file_has_what_pool_states_gives(suffix: str, tmp_path: Path, capsys: Any) -> None:
    framework = "chainer" if suffix == ".npz" else "torch"
    paths = [str(tmp_path / f"{i}{suffix}") for i in range(3)]
    for path, one in zip(paths, states(framework), strict=True):
        plain.make(Path(path), one)
    target = tmp_path / f"pool{suffix}"
    counts = ["--counts", *map(str, COUNTS), "-o", str(target)]
    assert cli.main(["pool", *paths, *counts]) == 0
    assert f"wrote {target}: 4 arrays" in capsys.readouterr().out
    written, expected = files.read(target, ""), pool_states(states(framework), COUNTS)
    assert written.keys() == expected.keys()
    for key, a in expected.items():
        np.testing.assert_array_equal(written[key], a)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two files of one model, and a target that holds something."""
    for name, one in zip("ab", states("torch"), strict=False):
        plain.make(tmp_path / f"{name}.pt", {"model": one})  # as training scripts save
    (tmp_path / "dst.pt").write_bytes(plain.BEFORE)
    return [str(tmp_path / name) for name in ("a.pt", "b.pt")]


def refused(sources: list[str], *options: str, capsys: Any) -> str:
    """What the command says; the target is as before."""
    target = Path(sources[0]).with_name("dst.pt")
    options = ("--counts", "1", "2", "--prefix", "model", "-o", str(target), *options)
    assert cli.main(["pool", *sources, *options]) == 2
    assert target.read_bytes() == plain.BEFORE
    said: str = capsys.readouterr().err
    assert said.startswith("multibn pool: ")
    return said


def test_the_command_refuses_what_does_not_fit(two: list[str], capsys: Any) -> None:
    assert "`counts` must have the same length" in refused(two, "--counts", "1", capsys=capsys)
    other = str(plain.make(Path(two[0]).with_name("c.npz")))
    said = refused([two[0], other], capsys=capsys)
    assert "SRC and DST must be files of one framework: got chainer, torch. Convert" in said
    other = str(plain.make(Path(two[0]).with_name("c.pt"), {"model": {"x": torch.zeros(2)}}))
    said = refused([two[0], other], capsys=capsys)
    assert f" in {two[0]} and none in {other}. Pool" in said


def test_states_that_hold_more_than_arrays_and_numbers_that_do_not_fit_are_refused() -> None:
    message = r"'extra' must be a dense array or tensor .*: got dict"
    with pytest.raises(CheckpointError, match=message):
        pool_states([{"extra": {"a": 1}}, {"extra": {"a": 1}}], [1, 1])
    half = [
        {"avg_mean": np.full(1, m, np.float16), "avg_var": np.ones(1, np.float16)}
        for m in (-300, 300)
    ]
    with pytest.raises(CheckpointError, match="'avg_var' is too large for float16"):
        pool_states(half, [1, 1])
