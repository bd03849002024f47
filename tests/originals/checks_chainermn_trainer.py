"""ChainerMN's training: its data sets, optimizer, evaluator, snapshots and resume; 2 ranks.

Under mpiexec only. chainermn is imported by the checks, not here: importing it initialises MPI.
"""

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from multibn.chainer_backend import MultiNodeBatchNormalization, create_mnbn_model
from multibn.communicators import Communicator
from tests.harness.runs import on
from tests.originals import chainer_programs

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F, links as L, training  # isort: skip
from chainer.training import extensions  # isort: skip

RUNS = on("mpiexec", 2, needs="chainer")

BATCH_SIZE = 4  # of one rank
NUM_SAMPLES = 32
NUM_CLASSES = 3


@functools.cache
def naive() -> Any:
    """ChainerMN's communicator for arrays in host memory, made once: its creation is collective."""
    import chainermn

    return chainermn.create_communicator("naive")


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(2, 4, 3, nobias=True)
            self.bn1 = L.BatchNormalization(4)
            self.fc1 = L.Linear(36, 8, nobias=True)
            self.bn2 = L.BatchNormalization(8, decay=0.8, eps=1e-3)
            self.fc2 = L.Linear(8, NUM_CLASSES)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(self.conv(x)))
        return self.fc2(F.relu(self.bn2(self.fc1(h))))


Convert = Callable[[Any], Any]


def ours(model: Any) -> Any:
    return create_mnbn_model(model, naive())


def ours_as_theirs(model: Any) -> Any:
    return create_mnbn_model(model, naive(), weighting="rank", avg_var="unbiased_local")


def theirs(model: Any) -> Any:
    import chainermn

    return chainermn.links.create_mnbn_model(model, naive())


def network(convert: Convert = lambda model: model) -> Any:
    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers draw from it)
    with chainer.using_config("dtype", np.float64):
        return L.Classifier(convert(Net()))


def samples(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    labels = rng.integers(NUM_CLASSES, size=NUM_SAMPLES, dtype=np.int32)
    xs = rng.normal(labels[:, None, None, None], 2, (NUM_SAMPLES, 2, 5, 5))
    return chainer.datasets.TupleDataset(xs, labels)


def scattered(seed: int) -> Any:
    """This rank's part of data that rank 0 holds."""
    import chainermn

    whole = samples(seed) if naive().rank == 0 else None
    return chainermn.scatter_dataset(whole, naive(), shuffle=True, seed=seed)


def iterator(dataset: Any, size: int = BATCH_SIZE, **options: Any) -> Any:
    return chainer.iterators.SerialIterator(dataset, size, **options)


def multi_node_trainer(convert: Convert, out: Path) -> tuple[Any, Any]:
    """A trainer and its model, as ChainerMN's examples write them."""
    import chainermn

    comm = naive()
    model = network(convert)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm
    ).setup(model)
    updater = training.StandardUpdater(iterator(scattered(1), shuffle=False), optimizer)
    trainer = training.Trainer(updater, (2, "epoch"), out=os.fspath(out))
    evaluator = extensions.Evaluator(iterator(scattered(2), repeat=False, shuffle=False), model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(extensions.LogReport(filename=f"log.{comm.rank}"))
    return trainer, model


def single_node_trainer(out: Path) -> tuple[Any, Any]:
    """One process on the batches that all ranks hold together, with Chainer's own link."""
    parts = naive().mpi_comm.allgather([*scattered(1)])
    steps = [part[i : i + BATCH_SIZE] for i in range(0, 16, BATCH_SIZE) for part in parts]
    model = network()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    batches = iterator([s for step in steps for s in step], 2 * BATCH_SIZE, shuffle=False)
    trainer = training.Trainer(
        training.StandardUpdater(batches, optimizer), (2, "epoch"), out=os.fspath(out)
    )
    test = iterator(samples(2), repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(test, model))
    trainer.extend(extensions.LogReport())
    return trainer, model


def after_first_epoch() -> Any:
    return training.triggers.ManualScheduleTrigger(1, "epoch")  # it has a state of its own


def broadcast(trainer: Any, model: Any) -> tuple[Any, Any]:
    """Lets ChainerMN's optimizer broadcast now; otherwise its first update does only that."""
    trainer.updater.get_optimizer("main").update()
    return trainer, model


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, the same on both ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(naive().bcast_obj(own if naive().rank == 0 else None))
        naive().mpi_comm.Barrier()


@contextmanager
def known_warnings() -> Iterator[None]:
    """Those of ChainerMN's own link and checkpointer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is experimental", FutureWarning)
        warnings.filterwarnings("ignore", "Link._device_id", DeprecationWarning)
        warnings.filterwarnings("ignore", "Checkpointer is deprecated", DeprecationWarning)
        yield


def state(model: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    chainer.serializers.DictionarySerializer(arrays).save(model)
    return arrays


def run(trainer: Any, model: Any, out: Path) -> tuple[dict[str, Any], Any]:
    """The state of the trained model, and the mean of the ranks' logs."""
    with known_warnings():
        trainer.run()
    naive().mpi_comm.Barrier()
    logs = [json.loads(file.read_text()) for file in sorted(out.glob("log*"))]
    return state(model), [
        {name: np.mean([e[name] for e in entries]) for name in entries[0]}
        for entries in zip(*logs, strict=True)
    ]


def assert_close(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=rtol, err_msg=name)


def assert_logs_close(actual: Any, expected: Any, first: int = 0) -> None:
    """Compare from entry `first` on: a snapshot of rank 0 gives the other rank its log so far."""
    assert len(actual) == len(expected) == 2
    for a, b in zip(actual[first:], expected[first:], strict=True):
        assert a.keys() == b.keys()
        assert "validation/main/loss" in a
        for name in a.keys() - {"elapsed_time"}:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-9, err_msg=name)


def check_trainer_equals_chainermns_own_link(world: Communicator) -> None:
    results = []
    for convert in (theirs, ours_as_theirs):
        with folder() as out, known_warnings():
            results.append(run(*multi_node_trainer(convert, out), out))
    (expected, expected_log), (actual, log) = results
    assert_close(actual, expected)
    assert_logs_close(log, expected_log)


def check_trainer_equals_one_process_on_the_whole_batch(world: Communicator) -> None:
    with folder() as out:
        actual, log = run(*broadcast(*multi_node_trainer(ours, out)), out)
    with tempfile.TemporaryDirectory() as own:
        expected, expected_log = run(*single_node_trainer(Path(own)), Path(own))
    assert_close(actual, expected)
    assert_logs_close(log, expected_log)


def check_resume_is_bit_for_bit(world: Communicator) -> None:
    """The snapshot is rank 0's, which ChainerMN hands to all ranks, or one of each rank."""
    import chainermn

    def multi_node_snapshot() -> Any:
        snapshot = extensions.snapshot(filename="snapshot", autoload=True)
        return chainermn.extensions.multi_node_snapshot(naive(), snapshot, replica_sets=[])

    with folder() as out, known_warnings():
        checkpointer = chainermn.create_multi_node_checkpointer("test", naive(), path=out)
        first = broadcast(*multi_node_trainer(ours, out))
        first[0].extend(multi_node_snapshot(), trigger=after_first_epoch())
        first[0].extend(
            lambda trainer: checkpointer.save(trainer, trainer.updater.iteration),
            name="checkpointer",
            trigger=after_first_epoch(),
        )
        expected = run(*first, out)

        from_snapshot = broadcast(*multi_node_trainer(ours, out))
        from_snapshot[0].extend(multi_node_snapshot(), trigger=after_first_epoch())
        from_checkpoint = broadcast(*multi_node_trainer(ours, out))
        checkpointer.maybe_load(
            from_checkpoint[0], from_checkpoint[0].updater.get_optimizer("main")
        )
        assert from_checkpoint[0].updater.epoch == 1
        results = [run(*each, out) for each in (from_snapshot, from_checkpoint)]
    for actual, log in results:
        assert_close(actual, expected[0], rtol=0)
        assert_logs_close(log, expected[1], first=1)


def check_snapshots_of_chainermns_own_link_go_on(world: Communicator) -> None:
    """A job that began with ChainerMN's link goes on with ours, and the other way round."""
    with folder() as out, known_warnings():
        results = []
        for convert, other in ((theirs, ours_as_theirs), (ours_as_theirs, theirs)):
            first = broadcast(*multi_node_trainer(convert, out))
            first[0].extend(extensions.snapshot(filename="snapshot"), trigger=after_first_epoch())
            results.append(run(*first, out))
            second = broadcast(*multi_node_trainer(other, out))
            chainer.serializers.load_npz(out / "snapshot", second[0])
            assert second[0].updater.epoch == 1
            results.append(run(*second, out))
    for actual, log in results[1:]:
        assert_close(actual, results[0][0])
        assert_logs_close(log, results[0][1], first=1)


class Generator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(4, 50, nobias=True)
            self.bn1 = L.BatchNormalization(50)
            self.deconv = L.Deconvolution2D(2, 2, 3, pad=1)
            self.bn2 = L.BatchNormalization(2)

    def forward(self, z: Any) -> Any:
        h = F.reshape(F.relu(self.bn1(self.fc(z))), (len(z), 2, 5, 5))
        return F.sigmoid(self.bn2(self.deconv(h)))


def adversarial(convert: Convert, rank: int) -> dict[str, Any]:
    """The states of two networks after the steps of ChainerMN's DCGAN example.

    A step runs the second network on two batches, and goes back through it twice.
    """
    import chainermn

    np.random.seed(0)  # noqa: NPY002 (Chainer's initializers draw from it)
    with chainer.using_config("dtype", np.float64):
        networks = chainer.ChainList(convert(Generator()), convert(Net()))
    generator, critic = networks
    optimizers = [
        chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), naive())
        for _ in networks
    ]
    for optimizer, each in zip(optimizers, networks, strict=True):
        optimizer.setup(each)
    rng = np.random.default_rng(rank)
    for _ in range(4):
        real = critic(rng.random((4, 2, 5, 5)))
        fake = critic(generator(rng.normal(size=(4, 4))))
        losses = F.mean(F.softplus(-fake)), F.mean(F.softplus(-real)) + F.mean(F.softplus(fake))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.update(lambda loss=loss: loss)
    return state(networks)


def check_two_networks_equal_chainermns_own_link(world: Communicator) -> None:
    with known_warnings():
        expected, actual = (adversarial(c, world.rank) for c in (theirs, ours_as_theirs))
    assert_close(actual, expected)


def check_programs_for_chainermns_link_run_alike_with_ours(world: Communicator) -> None:
    import chainermn

    def original(size: int, **options: Any) -> Any:
        return chainermn.links.MultiNodeBatchNormalization(size, naive(), **options)

    def multibns(size: int, **options: Any) -> Any:
        options |= {"weighting": "rank", "avg_var": "unbiased_local"}
        return MultiNodeBatchNormalization(size, naive(), **options)

    programs = list(chainer_programs.PROGRAMS)
    programs.remove(chainer_programs.link_hooks)  # ChainerMN's link calls no hooks
    with known_warnings():
        results = [[p(make, world.rank) for p in programs] for make in (original, multibns)]
    for expected, actual in zip(*results, strict=True):
        chainer_programs.assert_same(actual, expected)
