"""Every communicator that the launcher can drive conforms; bad groups are refused."""

import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from multibn import torch_backend, wire
from multibn.communicators import Communicator, as_communicator
from multibn.communicators.exit import watched_channels
from multibn.communicators.layer_communicator import reject_input
from multibn.communicators.transports import mpi, torch_distributed
from multibn.communicators.transports.torch_distributed import TorchDistributed
from multibn.communicators.watchdog import SECONDS_UNTIL_STATUS
from multibn.engine import consistency
from tests.communicators import conformance
from tests.communicators.phases import Phase, new_group
from tests.communicators.transports import standin_cupy
from tests.harness.runs import on, only
from tests.helpers import require

RUNS = on("torchrun mpiexec", 1, 2, 3, 4, needs="torch")


def check_every_transport_conforms(world: Communicator) -> None:
    """So does a group of each."""
    for comm in _of_each_transport(world):
        conformance.check_communicator(comm)
    conformance.check_communicator(world.split(world.rank // 2))


@only(sizes=(2, 3, 4))
def check_every_transport_names_who_misses_a_deadline(world: Communicator) -> None:
    """So does every transport of the launcher."""
    for comm in _of_each_transport(world):
        conformance.check_deadline(comm, world)


@only(sizes=(2,))
def check_interruptions_and_forks_are_named(world: Communicator) -> None:
    """So does every transport of the launcher."""
    for comm in _of_each_transport(world):
        conformance.check_fork(comm, used=False)
        conformance.check_fork(comm, used=True)
        conformance.check_interruption(comm, world)


def _of_each_transport(world: Communicator) -> Iterator[Any]:
    if isinstance(world, TorchDistributed):
        for _ in _with_and_without_shared_memory():
            yield TorchDistributed(dist.new_group())
        yield TorchDistributed(_of_another_backend(world.size))
        return
    yield mpi.MPI(new_group(world))
    if require.available("chainer"):
        from multibn.chainer_backend import compat
        from multibn.communicators.transports.chainermn import ChainerMN

        compat.make_importable()
        import chainermn

        yield ChainerMN(chainermn.create_communicator("naive", new_group(world)))


def _with_and_without_shared_memory() -> Iterator[None]:
    """Yield twice: in the second turn, messages of one machine go as those of several do."""
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIBN_SHARED_MEMORY", "0")
        yield


@only("torchrun", sizes=(2, 3, 4))
def check_shared_memory_is_for_small_arrays(world: Communicator) -> None:
    connected = []
    for _ in _with_and_without_shared_memory():
        communicator = fresh(world)
        for n in (1, 200_000):
            np.testing.assert_array_equal(communicator.allreduce(np.ones(n)), world.size)
            transport = communicator.channel.transport
            gloo = transport._private_gloo._group
            connected.append((transport._shared_memory is not None, gloo is not None))
    assert connected == [(True, False), (True, True), (False, True), (False, True)]


def _of_another_backend(size: int) -> Any:
    """A group over a backend of which multibn knows nothing."""
    name = "another"
    if name.upper() not in dir(dist.Backend):
        gloo: Any = dist.ProcessGroupGloo
        dist.Backend.register_backend(
            name, lambda store, rank, size, timeout: gloo(store, rank, size, timeout), devices="cpu"
        )
    return dist.new_group(list(range(size)), backend=name)


@only(sizes=(2,))  # the answers do not depend on the number of ranks
def check_gpu_tensors_go_through_the_channel(world: Communicator) -> None:
    """No GPU is needed to see the way over gloo and MPI."""
    transport: Any = world
    with FakeTensorMode():
        on_gpu = torch.empty(3, device="cuda")
    assert on_gpu.device.type == "cuda"
    assert not transport.reduces_on_device(on_gpu)
    assert not transport.reduces_on_device(torch.ones(3))


@only(sizes=(2, 3, 4), needs=("a machine without CuPy",))
def check_numbers_from_a_gpu_are_looked_at_in_host_memory(world: Communicator) -> None:
    """The numbers come through host memory here: at once, and not one call later."""
    phase = Phase(world, "bn")
    mark = wire.rank_bit(world.rank)
    with standin_cupy.installed() as cupy:
        payload = np.full(8, mark if world.rank == 1 else 1.0)
        message = r"of bn are not finite: .* rank\(s\) \[1\] of"
        with pytest.raises(FloatingPointError, match=message):
            phase.allreduce(cupy.asarray(payload))
        if world.rank == 1:  # this rank has an error of its own
            reject_input(phase.layer, None, 3, cupy.asarray(payload))
        else:
            message = r"in bn \(forward, .*\): the input was rejected on"
            with pytest.raises(RuntimeError, match=message):
                phase.allreduce(cupy.asarray(payload))
        summed = phase.allreduce(cupy.asarray(np.ones(8)))
        assert isinstance(summed, cupy.ndarray)
        np.testing.assert_array_equal(summed.get(), world.size)


def check_native_objects_are_recognised(world: Communicator) -> None:
    ones = np.ones(2)
    if isinstance(world, TorchDistributed):
        mesh = dist.init_device_mesh("cpu", (1, world.size), mesh_dim_names=("a", "b"))
        natives: list[Any] = [dist.group.WORLD, mesh["b"]]
        with pytest.raises(RuntimeError, match="DeviceMesh have 2 dimensions"):
            as_communicator(mesh)
        assert "mpi4py.MPI" not in sys.modules
    else:
        from mpi4py import MPI

        natives = [MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()]
        for other in (MPI.INT, MPI.Status(), MPI.COMM_WORLD.group, MPI.SUM):
            message = r"None, .* an mpi4py Comm, .* of type (MPI\.)?\w+\."
            with pytest.raises(TypeError, match=message):
                as_communicator(other)  # type: ignore[arg-type]
        alone = as_communicator(MPI.COMM_SELF)
        assert alone.size == pickle.loads(pickle.dumps(alone)).size == 1
        if world.size > 1:
            half: Any = MPI.COMM_WORLD.Split(world.rank % 2)
            inter = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - world.rank % 2)
            with pytest.raises(TypeError, match="must be an intracommunicator"):
                as_communicator(inter)
    for native in natives:
        communicator = as_communicator(native)
        assert (communicator.rank, communicator.size) == (world.rank, world.size)
        assert communicator.allreduce(ones)[0] == world.size


def fresh(world: Communicator) -> Any:
    """A communicator of the same ranks that has communicated nothing yet."""
    return as_communicator(new_group(world))


def _resources() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def check_any_number_of_widths_takes_no_descriptors_and_threads(world: Communicator) -> None:
    """Nor communicators of MPI, of which a process has some thousands."""
    for _ in _with_and_without_shared_memory():
        communicator = fresh(world)
        Phase(communicator, "first").allreduce(np.ones(6))
        before = _resources()
        for C in range(3, 403, 4):
            a = np.arange(2.0 * C + 2)
            summed = Phase(communicator, f"bn{C}").allreduce(a + world.rank)
            np.testing.assert_array_equal(summed, world.size * a + sum(range(world.size)))
        assert _resources() == before


@only(sizes=(2,))  # the same code for any number of ranks
def check_what_the_user_destroys_is_let_go(world: Communicator) -> None:
    counts = []
    for _ in range(6):
        communicator = fresh(world)
        for C in (8, 100):
            phase = Phase(communicator, f"bn{C}")
            phase.allreduce(np.ones(2 * C + 2))
        channel = communicator.channel
        if isinstance(world, TorchDistributed):
            name = f"multibn/{communicator.group.group_name}/"
            dist.destroy_process_group(communicator.group)
            world.allreduce(np.ones(1))  # the last rank to let go deletes the keys
            keys = dist.distributed_c10d._get_default_store().list_keys()
            assert [key.split("/")[-1] for key in keys if name in key] == ["arrivals"]
        else:
            communicator.mpi_comm.Free()
            assert channel.transport.duplicate is None
        with pytest.raises(RuntimeError, match="its process group was destroyed"):
            channel.allreduce(np.ones(1))
        sends = partial(communicator.allreduce, np.ones(1)), partial(phase.allreduce, np.ones(202))
        for send in sends:
            message = r"process group.* was destroyed\. Give the layer"
            with pytest.raises(RuntimeError, match=message):
                send()
        counts.append((*_resources(), len(watched_channels)))
    world.allreduce(np.ones(1))
    assert counts[-1] == counts[1]  # the first may start a thread that stays


@only("torchrun", sizes=(2, 3, 4))
def check_a_rank_that_lets_go_is_missed(world: Communicator) -> None:
    """Ranks that wait for a message miss it at once, and not after a deadline."""
    communicator = fresh(world)
    communicator.allreduce(np.ones(1))
    if world.rank == 1:
        dist.destroy_process_group(communicator.group)
        world.allreduce(np.ones(1))
    else:
        with pytest.raises((ConnectionError, RuntimeError)) as raised:
            communicator.allreduce(np.ones(1))
        watched_channels.discard(communicator.channel)
        world.allreduce(np.ones(1))
        # Ranks that have no connection with rank 1 hear of the failure of those that have.
        said = "for rank(s) [1], which have already exited or left the group: rank 1 (mach"
        assert said in str(raised.value)


@only(sizes=(2, 3, 4))
def check_unlike_arrays_are_an_error_on_all_ranks(world: Communicator) -> None:
    """Sums of unlike arrays: over gloo itself, the process with the shorter one would end."""
    ones = np.ones(3)
    others = [np.ones(n) for n in (4, 20_000, 200_000)]
    for other in (*others, np.ones(3, "float32"), ones[:, None]):
        for _ in _with_and_without_shared_memory():
            communicator = fresh(world)
            for _ in range(2):  # the group stays of use
                np.testing.assert_array_equal(communicator.allreduce(ones), world.size * ones)
                with pytest.raises(RuntimeError, match="different places: rank") as raised:
                    communicator.allreduce(other if world.rank == 1 else ones)
                said = str(raised.value)
                assert "in a sum of float64 numbers of shape (3,); rank(s) [1] in a" in said


@only(sizes=(2, 3, 4))
def check_messages_of_unlike_widths_are_told_apart_at_once(world: Communicator) -> None:
    """So are layers of one name, and layers with a rest; and all ranks go on."""
    for names, widths in itertools.product(("ab", ("bn", "bn")), ((40, 60), (40, 400), (300, 400))):
        communicator = fresh(world)
        layers = [(Phase(communicator, name), C) for name, C in zip(names, widths, strict=True)]
        for _ in range(60):
            for phase, C in layers:
                np.testing.assert_array_equal(phase.allreduce(np.ones(2 * C + 2)), world.size)
        seconds = []
        for _ in range(2):
            phase, C = layers[world.rank == 1]
            begun = time.monotonic()
            with pytest.raises(RuntimeError, match="the ranks are in different places: ") as raised:
                phase.allreduce(np.ones(2 * C + 2))
            seconds.append(time.monotonic() - begun)
            told = [f"{name} (forward, float32, call" for name in names]
            if names[0] == names[1]:
                told = [f", {C} channels" for C in widths]
            assert all(text in str(raised.value) for text in told), raised.value
            for phase, C in layers:
                np.testing.assert_array_equal(phase.allreduce(np.ones(2 * C + 2)), world.size)
        # Who learns it from notices always waits so long; a busy machine lets a rank wait once.
        assert min(seconds) < SECONDS_UNTIL_STATUS, seconds


@only(sizes=(2, 3, 4))
def check_a_refused_input_is_told_in_any_message(world: Communicator) -> None:
    communicator = fresh(world)
    layers = [Phase(communicator, f"bn{C}") for C in (3, 5)]
    for phase, C in zip(layers, (3, 5), strict=True):
        phase.allreduce(np.ones(2 * C + 2))
    nothing: Any = {"parameters": (), "statistics": ()}
    check_sync = partial(consistency.check_equal, {}, communicator, **nothing)
    new = Phase(communicator, "new")
    others: dict[str, Callable[[], object]] = {
        "bn5 (forward, float32, call 2)": lambda: layers[1].allreduce(np.ones(12)),
        "bn3 (forward, float32, call 2)": lambda: layers[0].allreduce(np.ones(8)),
        "a sum of float64 numbers of shape (1,)": lambda: communicator.allreduce(np.ones(1)),
        "check_sync": check_sync,
        "the first message of new (forward, float32, call 1)": lambda: new.allreduce(np.ones(8)),
    }
    for place, send in others.items():
        if world.rank == 1:
            reject_input(layers[0].layer)  # the rank that refuses has an error of its own
        else:
            with pytest.raises(RuntimeError, match="stops in") as raised:
                send()
            told = f"in {place}: the input was rejected on rank(s) [1]"
            assert told in str(raised.value)


def check_a_group_without_this_rank_is_refused(world: Communicator) -> None:
    if isinstance(world, TorchDistributed):
        group = dist.new_group([0])
    else:
        from mpi4py import MPI

        group = MPI.COMM_WORLD.Split(0 if world.rank == 0 else MPI.UNDEFINED)
    if world.rank == 0:
        assert as_communicator(group).size == 1
    else:
        with pytest.raises(ValueError, match=f"rank {world.rank}.*[Gg]ive each process the"):
            as_communicator(group).allreduce(np.ones(1))


def check_a_pickle_of_a_larger_world_or_of_other_ranks_is_refused(world: Communicator) -> None:
    """MPI and torch hear nothing of ranks that they do not have."""
    restore: Any = mpi._restore
    where = "MPI.COMM_WORLD"
    if isinstance(world, TorchDistributed):
        restore, where = torch_distributed.restore, "torch.distributed"
    others = [(r,) for r in range(world.size) if r != world.rank]
    for ranks in ((world.size,), (world.rank, world.size), *others):
        restored = restore(ranks)
        refused = rf"made for ranks \[.*{ranks[-1]}\] of {where}, and this is rank "
        with pytest.raises(RuntimeError, match=rf"{refused}{world.rank} of {world.size}\. Give th"):
            restored.allreduce(np.ones(1))


@only(sizes=(2,))
def check_the_sums_of_functions_have_their_names(world: Communicator) -> None:
    model = torch_backend.SyncBatchNorm(2, process_group=world)
    channel = world.channel  # type: ignore[attr-defined]
    options: Any = {"data_loader": [torch.randn(4, 2)], "process_group": world}
    for name, call in {
        "check_sync": lambda: torch_backend.check_sync(model, world),
        "average_gradients": lambda: torch_backend.average_gradients(model, world),
        "sync_running_stats": lambda: torch_backend.sync_running_stats(model, world),
        "precise batch norm": lambda: torch_backend.update_bn_stats(model, **options),
    }.items():
        call()
        assert str(channel.watchdog._last).startswith(f"{name} (a sum of ")
