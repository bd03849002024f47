"""The benchmark's command, its cost model against numbers worked out by hand, and evidence/."""

import json
import math
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks.__main__ as benchmarks
from benchmarks import layer, machine, parts, peers, scaling
from benchmarks.scaling import Cluster, all_gather_bytes
from evidence import batch_size, domains, precise, skew
from evidence.__main__ import section
from multibn import SingleProcess
from multibn.check import timing
from multibn.check.network import resnet50
from tests.helpers import launch, require

NEEDS = "cli torch dev"

CLUSTER = Cluster()


# NCCL's constants by hand: 6.8 + 2 (7*0.6 + 3*5.0), 6.6 + 2 (56*0.6 + 7*2.7) and so on.
@pytest.mark.parametrize(
    "ranks, times",  # by a tree, by a ring, and of an all-gather without data and of 16,388 bytes
    [
        (8, (15.2, 15.0, 10.8, 13.7)),
        (16, (25.2, 28.8, 17.7, 23.8)),
        (64, (45.2, 111.6, 59.1, 84.9)),
        (1024, (85.2, 1767.6, 887.1, 1306.2)),
        (8192, (115.2, 14132.4, 7069.5, 10425.4)),
    ],
)
def test_latencies_of_a_cluster_are_those_found_by_hand(ranks: int, times: Any) -> None:
    reduced = CLUSTER.tree_allreduce(ranks, 0), CLUSTER.ring_allreduce(ranks, 0)
    gathered = (CLUSTER.all_gather(ranks, n) for n in (0, all_gather_bytes(2048)))
    assert (*reduced, *gathered) == pytest.approx(times, abs=0.05)
    assert CLUSTER.allreduce(ranks, 0) == min(reduced)


def test_payloads_and_variants_take_the_time_found_by_hand() -> None:
    # 40,000 bytes take a microsecond; a tree moves them twice, a ring of 8 twice 7/8.
    assert CLUSTER.tree_allreduce(64, 40e3) - CLUSTER.tree_allreduce(64, 0) == pytest.approx(2)
    assert CLUSTER.ring_allreduce(8, 40e3) - CLUSTER.ring_allreduce(8, 0) == pytest.approx(1.75)
    assert CLUSTER.grouped(8192, 0) == pytest.approx(15.0)
    # Three times 6.8, 7 hops of 0.6 each way, and 2 log2(8) hops of 5 over the network.
    assert CLUSTER.hierarchical(64, 0) == pytest.approx(20.4 + 8.4 + 30)
    assert CLUSTER.hierarchical(8, 0) == pytest.approx(13.6 + 8.4)
    assert CLUSTER.mpi_allreduce(1024, 40e3) == pytest.approx(25)
    assert scaling.allreduce_bytes(64) == 8 * (2 * 64 + 4)


def test_the_table_of_resnet50_goes_up_to_8192_ranks() -> None:
    assert (len(scaling.RESNET50), sum(scaling.RESNET50)) == (53, 26560)
    rows = {row["ranks"]: row for row in scaling.table(CLUSTER, scaling.RESNET50)}
    assert list(rows) == [2**i for i in range(3, 14)]
    assert rows[8192]["tree_allreduce"] == pytest.approx(6130, rel=0.01)
    assert rows[8192]["all_gather"] == pytest.approx(418e3, rel=0.01)


def test_take_turns_counts_rounds_and_the_slowest_rank_counts() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = timing.take_turns(steps, SingleProcess(), seconds=0)
    assert {name: len(t) for name, t in times.items()} == {"a": 5, "b": 5}
    assert "".join(calls) == "abab" + "abbaabbaab"  # two to warm up; each round begins elsewhere
    slow = timing.slowest([{"a": np.array([[1.0, 5]])}, {"a": np.array([[3.0, 2]])}])
    assert slow["a"].tolist() == [[3, 5]]


def test_ratios_are_medians_of_the_same_rounds() -> None:
    ours = np.array([[1.0, 8], [2, 8], [30, 1]])
    peer = np.array([[2.0, 2], [4, 2], [6, 2]])
    assert parts.ratio(ours, peer) == 0.5
    assert parts.ratio(ours, peer, timing.PROCESSOR) == 4


def test_the_naive_formula_is_batch_norm_in_one_process() -> None:
    x = torch.randn(8, 3, 5, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(8, 3, 5, dtype=torch.float64)
    gradients: list[torch.Tensor] = []
    outputs = []
    for module in (peers.NaiveFormula(3, SingleProcess()), torch.nn.BatchNorm1d(3)):
        y = module.double()(x)
        outputs.append(y)
        gradients += torch.autograd.grad(y, [x, *module.parameters()], dy)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients[:3], gradients[3:], rtol=1e-9, atol=1e-9)


def test_the_network_is_resnet50() -> None:
    with torch.device("meta"):
        network = resnet50()
        assert network(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
    channels = [m.num_features for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert sorted(channels) == sorted(scaling.RESNET50)
    assert sum(p.numel() for p in network.parameters()) == 25_557_032  # as torchvision counts


def test_machine_has_no_name() -> None:
    text = json.dumps(machine.describe())
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert json.loads(text)["versions"]["torch"]


def test_the_command_writes_the_parts_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part on real ranks, and those that need none; the others are launched alike."""
    require.need("mpiexec")
    names = ["torch", "model", "neighbours"]
    options = ["--quick", "--parts", *names, "--output", str(tmp_path)]
    assert benchmarks.main(options) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    assert set(results) == {"machine", *names}
    assert [row["variant"] for row in results["torch"]] == ["NCHW", "channels_last", "NC"]
    for row in results["torch"]:
        assert set(row["ratio"]) == {"nn.BatchNorm", "naive", "copies"}
        assert all(math.isfinite(value) and value > 0 for value in row["ratio"].values())
    assert len(results["neighbours"]) == 5
    assert all(row["ratio"]["peer"] > 0 for row in results["neighbours"])
    printed = capsys.readouterr().out
    assert "channels_last" in printed
    assert "<svg" in (tmp_path / "layer-torch.svg").read_text()


def test_command_says_which_part_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.QUICK, "shapes", ((2,),))
    options = ["--quick", "--parts", "torch", "--output", str(tmp_path)]
    assert benchmarks.main(options) == 1
    assert "torch: not run: " in capsys.readouterr().out


def test_command_refuses_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main(["--parts", "all"])
    assert "argument --parts: invalid choice: 'all'" in capsys.readouterr().err


def test_committed_results_hold_every_part() -> None:
    results = json.loads((benchmarks.RESULTS / "bench.json").read_text())
    results |= json.loads((benchmarks.RESULTS / "neighbours.json").read_text())
    assert set(results) == {"machine", *parts.PARTS}
    shapes = {tuple(row["shape"]) for row in results["torch"]}
    assert shapes == set(layer.SHAPES)


def _results(study: ModuleType) -> dict[str, Any]:
    text = (launch.ROOT / f"evidence/results/{study.NAME}.json").read_text()
    results: dict[str, Any] = json.loads(text)
    return results


@pytest.mark.parametrize("study", [skew, precise, batch_size, domains], ids=lambda s: s.NAME)
def test_the_pages_have_the_results(study: ModuleType) -> None:
    """The pictures are drawn in pages/test_pictures.py."""
    assert section(study, _results(study)) in (launch.ROOT / "evidence/README.md").read_text()
    guide = (launch.ROOT / "docs/guides/which-batch-norm.md").read_text()
    assert f"]({study.NAME}.svg)" in guide


def test_synchronized_layers_gain_50_points_on_skewed_data() -> None:
    rows = _results(skew)["rows"]
    assert {row["seed"] for row in rows} == set(range(5))
    first, _, last = (skew.accuracy(rows, 5, "skewed", norm)[0] for norm in skew.NORMS)
    assert last - first >= 50
