"""Every communicator that the launcher can drive conforms; bad groups are refused."""

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multibn.communicators import Communicator, SingleProcess, as_communicator
from multibn.communicators.conversation import Conversation
from tests.helpers import conformance, require, standin_cupy


def _under_torchrun(world: Communicator) -> bool:
    return type(world).__name__ == "TorchDistributed"


def check_world_conforms(world: Communicator) -> None:
    conformance.check_communicator(world)


def check_group_conforms(world: Communicator) -> None:
    conformance.check_communicator(world.split(world.rank // 2))


def check_single_process_conforms(world: Communicator) -> None:
    conformance.check_communicator(SingleProcess())


def check_default_conforms(world: Communicator) -> None:
    """None is the default process group under torchrun."""
    default = as_communicator(None)
    if _under_torchrun(world):
        assert (default.rank, default.size) == (world.rank, world.size)
        conformance.check_communicator(default)


def check_chainermn_conforms(world: Communicator) -> None:
    if _under_torchrun(world) or not require.available("chainer"):
        return
    from tests.distributed.checks_chainermn import naive

    conformance.check_communicator(as_communicator(naive()))


def check_deadlines(world: Communicator) -> None:
    """Of every transport of the launcher."""
    for comm in _with_timeout(world):
        conformance.check_deadline(comm, world)


def check_interruptions_and_forks(world: Communicator) -> None:
    """Of every transport of the launcher."""
    if world.size != 2:
        return  # the lines of any number of ranks are the same code
    for comm in _with_timeout(world):
        conformance.check_fork(comm, used=False)
        conformance.check_fork(comm, used=True)
        conformance.check_interruption(comm, world)


def _with_timeout(world: Communicator) -> Iterator[Any]:
    if _under_torchrun(world):
        import torch.distributed as dist

        from multibn.communicators.torch_distributed import TorchDistributed

        yield TorchDistributed(dist.new_group(list(range(world.size))), timeout=0.8)
        yield TorchDistributed(_of_another_backend(world.size), timeout=0.8)
        return
    from mpi4py import MPI as mpi

    from multibn.communicators.mpi import MPI

    yield MPI(mpi.COMM_WORLD.Dup(), timeout=0.8)
    if require.available("chainer"):
        from multibn.chainer_backend import compat
        from multibn.communicators.chainermn import ChainerMN

        compat.make_importable()
        import chainermn

        yield ChainerMN(chainermn.create_communicator("naive", mpi.COMM_WORLD.Dup()), timeout=0.8)


def _of_another_backend(size: int) -> Any:
    """A group over a backend of which multibn knows nothing."""
    import torch.distributed as dist

    name = "another"
    if name.upper() not in dir(dist.Backend):
        gloo: Any = dist.ProcessGroupGloo
        dist.Backend.register_backend(
            name, lambda store, rank, size, timeout: gloo(store, rank, size, timeout), devices="cpu"
        )
    return dist.new_group(list(range(size)), backend=name)


def check_another_backend_conforms(world: Communicator) -> None:
    if _under_torchrun(world):
        conformance.check_communicator(as_communicator(_of_another_backend(world.size)))


def check_gpu_tensors_go_through_watched_lines(world: Communicator) -> None:
    """Over gloo, and over an MPI that is not CUDA-aware: no GPU is needed to see the way."""
    if world.size != 2 or not require.available("torch"):
        return  # the answers do not depend on the number of ranks
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    transport: Any = world
    with FakeTensorMode():
        on_gpu = torch.empty(3, device="cuda")
    assert on_gpu.device.type == "cuda"
    assert not transport.takes(on_gpu)
    assert not transport.takes(torch.ones(3))
    if not _under_torchrun(world):
        from multibn.communicators.mpi import MPI

        assert MPI(cuda_aware=True).takes(on_gpu)
        assert not MPI(cuda_aware=True).takes(on_gpu.half())


def check_numbers_from_a_gpu_are_looked_at_in_host_memory(world: Communicator) -> None:
    """At once, and not one call later: over these transports they come through host memory."""
    phase = Conversation(world, lambda: "bn").during("forward", np.dtype("float32"))
    if importlib.util.find_spec("cupy") is not None or world.size == 1:
        return
    with standin_cupy.installed() as cupy:
        for spoiled, kind, message in (
            (np.inf, FloatingPointError, r"of bn are not finite: .* on rank\(s\) \[1\] of"),
            (np.nan, RuntimeError, r"the input of bn was refused on rank\(s\) \[1\] of"),
        ):
            payload = cupy.asarray(np.full(8, spoiled if world.rank == 1 else 1.0))
            if world.rank == 1 and spoiled is np.nan:  # this rank has an error of its own
                phase.allreduce(payload)
                continue
            with pytest.raises(kind, match=message):
                phase.allreduce(payload)
        summed = phase.allreduce(cupy.asarray(np.ones(8)))
        assert isinstance(summed, cupy.ndarray)
        np.testing.assert_array_equal(summed.get(), world.size)


def check_native_objects_are_recognised(world: Communicator) -> None:
    ones = np.ones(2)
    if _under_torchrun(world):
        import torch.distributed as dist

        mesh = dist.init_device_mesh("cpu", (1, world.size), mesh_dim_names=("a", "b"))
        natives: list[Any] = [dist.group.WORLD, mesh["b"]]
        with pytest.raises(ValueError, match="must have one dimension: got 2"):
            as_communicator(mesh)
        assert "mpi4py.MPI" not in sys.modules
    else:
        from mpi4py import MPI

        natives = [MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()]
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


def check_a_group_without_this_rank_is_refused(world: Communicator) -> None:
    if _under_torchrun(world):
        import torch.distributed as dist

        group = dist.new_group([0])
    else:
        from mpi4py import MPI

        group = MPI.COMM_WORLD.Split(0 if world.rank == 0 else MPI.UNDEFINED)
    if world.rank == 0:
        assert as_communicator(group).size == 1
    else:
        with pytest.raises(ValueError, match=f"rank {world.rank}.*[Gg]ive each process the"):
            as_communicator(group)


def check_other_types_are_refused(world: Communicator) -> None:
    for wrong in ("nccl", 3.0, True, object(), {0, 1}):
        with pytest.raises(TypeError, match="a communicator must be None, a torch ProcessGroup"):
            as_communicator(wrong)
    if not require.available("torch"):
        return
    import torch

    with pytest.raises(TypeError, match="must be a torch ProcessGroup or DeviceMesh"):
        as_communicator(torch.ones(2))
