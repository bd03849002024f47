"""The comparison of ranks' arrays, over ranks as threads."""

import threading
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess, as_communicator
from multibn.communicators import Communicator
from multibn.engine import consistency
from multibn.engine.consistency import common_group
from tests.helpers.ranks import CountingCommunicator, run_ranks


def check_equal(arrays: dict[str, Any], world: Communicator, **options: Any) -> None:
    """Compare arrays, of which those of a "bn." are statistics and `codes` a buffer."""
    statistics = {name for name in arrays if name.startswith("bn.")}
    parameters = arrays.keys() - statistics - {"codes"}
    consistency.check_equal(arrays, world, parameters=parameters, statistics=statistics, **options)


def _arrays(rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"{i:02}": rng.normal(size=(3, i)) for i in range(12)}


def test_equal_arrays_take_three_small_collectives() -> None:
    def counts(world: Communicator) -> list[int]:
        counting = CountingCommunicator(world)
        check_equal(_arrays(world.rank), counting)
        check_equal(dict(reversed(_arrays(world.rank).items())), counting)  # in any order
        check_equal({}, counting)
        return counting.take()

    assert run_ranks(3, counts) == [[1, 3, 3 * 72] * 3] * 3  # of each rank, 72 letters


def test_every_rank_says_the_same_and_not_too_much() -> None:
    def message(world: Communicator) -> str:
        eight = {f"w{i}": np.full(1, world.rank) for i in range(8)}
        with pytest.raises(RuntimeError, match=r"w7 by up to 1 on rank 1, 2 on rank 2\. Broadcast"):
            check_equal(eight, world)
        arrays = _arrays(world.rank)
        for a in arrays.values():
            a += 0.25 * world.rank
        with pytest.raises(RuntimeError) as caught:
            check_equal(arrays, world)
        return str(caught.value)

    messages = run_ranks(3, message)
    assert len(set(messages)) == 1
    assert messages[0].startswith("11 of 12 arrays are not the same on all 3 ranks.")
    assert "01 by up to 0.25 on rank 1, 0.5 on rank 2; 02 by" in messages[0]
    assert "08 by up to 0.25 on rank 1, 0.5 on rank 2 and more. Broadcast them" in messages[0]


def _says(arrays: Any) -> str:
    """What `check_equal` says on both ranks of the `arrays` of each."""

    def message(world: Communicator) -> str:
        with pytest.raises(RuntimeError) as caught:
            check_equal(arrays(world.rank), world)
        return str(caught.value)

    first, second = run_ranks(2, message)
    assert first == second
    return first


_CAUSES = {
    "weight": "Running statistics agree: gradients are not averaged (Distr",
    "bn": "Parameters agree, running statistics differ: their layers are not synchronized, or",
    "codes": "Parameters and running statistics agree: each rank updates the other buffers from",
}


@pytest.mark.parametrize(
    "differing, cause",
    [
        (["weight"], "weight"),
        (["weight", "codes"], "weight"),
        (["bn.running_mean"], "bn"),
        (["bn.avg_mean"], "bn"),
        (["bn.num_batches_tracked"], "bn"),
        (["bn.running_mean", "codes"], "bn"),
        (["codes"], "codes"),
        (["weight", "bn.running_mean"], None),
    ],
)
def test_the_kinds_of_arrays_that_differ_tell_the_cause(differing: Any, cause: Any) -> None:
    """A kind is what an array is for, and not how its name begins."""

    def arrays(rank: int) -> dict[str, Any]:
        names = "weight", "codes", "bn.running_mean", "bn.avg_mean", "bn.num_batches_tracked"
        return {name: np.full(1, rank * (name in differing)) for name in names}

    said = _says(arrays)
    assert [kind for kind, words in _CAUSES.items() if words in said] == [cause] * bool(cause)
    without = _says(lambda rank: {"weight": np.full(1, rank)})
    assert not any(words in without for words in _CAUSES.values())


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_rank_that_differs_from_most_is_named(guilty: int) -> None:
    def check(world: Communicator) -> None:
        is_guilty = world.rank == guilty
        other = int(guilty == 0)
        found = rf"They differ from rank {other}'s: weight by up to 1 on rank {guilty}\. B"
        with pytest.raises(RuntimeError, match=found):
            check_equal({"weight": np.full(1, is_guilty)}, world)
        arrays = {"weight": np.zeros(1), **({"more": np.zeros(2)} if is_guilty else {})}
        found = (
            rf"Compared with rank {other}, rank {guilty} has more with shape=\(2,\), [^;]*64\. B"
        )
        with pytest.raises(RuntimeError, match=found):
            check_equal(arrays, world)

    run_ranks(3, check)


def test_ranks_that_share_the_memory_of_a_model_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads the memory twice; meanwhile another one has written to it."""
    read = threading.local()

    def digest(content: bytes) -> str:
        read.times = getattr(read, "times", 0) + 1
        return f"{content!r} of {threading.get_ident() if read.times == 1 else 0}"

    monkeypatch.setattr(consistency, "_digest", digest)
    said = _says(lambda rank: {"weight": np.zeros(2)})
    assert "1 of 1 arrays changed during the comparison, and are now the same on all ranks" in said
    assert "build or copy (copy.deepcopy) the model in each process." in said


def test_complex_numbers_are_compared_and_patterns_ignored() -> None:
    def check(world: Communicator) -> None:
        arrays = {"z": np.full(2, 1j * world.rank), "n": np.asarray(world.rank)}
        with pytest.raises(RuntimeError, match=r"1 of 1 .* z by up to 1 on rank 1\."):
            check_equal(arrays, world, ignore=["[a-n]"])
        check_equal(arrays, world, ignore=["z", "n*"])
        with pytest.raises(RuntimeError, match=r"1 of 1 .* z by up to"):
            check_equal(arrays, world, ignore="[a-n]*")  # one pattern, and not one a letter

    run_ranks(2, check)


def test_what_float64_does_not_show_is_named_without_a_distance() -> None:
    for first, second in (
        (np.array(["ab"]), np.array(["ac"])),
        (np.array([(1, 2.0)], "i4,f4"), np.array([(1, 3.0)], "i4,f4")),
        (np.array(2**63), np.array(2**63 + 1)),
        (np.zeros(1), -np.zeros(1)),
    ):
        own = first, second
        assert "rank 0's: own on rank(s) [1]. B" in _says(lambda rank, own=own: {"own": own[rank]})


def test_python_objects_are_refused() -> None:
    """Equal ones may have unlike addresses."""

    def check(world: Communicator) -> None:
        arrays = {"own": np.array([10**30]), "w": np.zeros(1)}
        message = r"^`own`, a ndarray, cannot be compared: it holds Pyth"
        with pytest.raises(TypeError, match=message):
            check_equal(arrays, world)
        check_equal(arrays, world, ignore="own")

    run_ranks(2, check)


def test_a_layer_alone_has_a_name() -> None:
    def check(world: Communicator) -> None:
        options = {"": {"eps": 1e-5 * (1 + world.rank)}}
        with pytest.raises(RuntimeError, match="has the layer with eps="):
            check_equal({"w": np.zeros(1)}, world, options=options)

    run_ranks(2, check)


@pytest.mark.parametrize("size", [1, 2])
def test_several_processes_without_a_group_are_refused(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_SIZE", str(size))
    if size == 1:
        assert isinstance(common_group({}, parameter="comm"), SingleProcess)
        return
    with pytest.raises(ValueError, match=r"`comm` must say .* started 2 processes \(PMI_SIZE=2\)"):
        common_group({"": as_communicator()}, parameter="comm")
    alone = SingleProcess()
    assert common_group({"": alone}, parameter="comm") is alone
