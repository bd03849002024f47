"""The communicator that None stands for: torch's default process group, else this process."""

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Any

from multibn.communicators.base import Communicator, Forwarding, Handle, SingleProcess


class DefaultCommunicator(Forwarding):
    """torch's default process group where one is initialised, else this process alone.

    Looked up at each use, so that a layer may be built, or loaded, before the group. If there is no
    group although a launcher started several processes, the first use warns.

    Examples
    --------
    >>> from multibn import as_communicator
    >>> as_communicator(None)
    DefaultCommunicator()
    """

    _warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return default_communicator, ()

    @property
    def default_group(self) -> object:
        # Without the attribute where torch was built without torch.distributed.
        group = getattr(sys.modules.get("torch.distributed"), "group", None)
        return None if group is None else group.WORLD

    def _look_up(self) -> Communicator:
        if self.default_group is not None:
            return _default_group()
        self._warn_if_launched()
        return SingleProcess()

    @classmethod
    def _warn_if_launched(cls) -> None:
        name, size = launched_processes()
        if cls._warned or size == 1:
            return
        cls._warned = True
        fix = "pass a communicator, mpi4py.MPI.COMM_WORLD for example"
        if name == "WORLD_SIZE":
            fix = "call torch.distributed.init_process_group() before the first training step"
        warnings.warn(
            f"batch statistics stay local to this process although the launcher started {size} "
            f"({name}={size}): no communicator was given and torch.distributed is not initialised. "
            f"To share them, {fix}; to keep them local, pass multibn.SingleProcess().",
            stacklevel=2,
        )


def launched_processes() -> tuple[str, int]:
    """The variable in which a launcher says how many processes it started; ("", 1) if none does."""
    # OMPI_COMM_WORLD_SIZE: Open MPI; PMI_SIZE: MPICH, Intel MPI; WORLD_SIZE: torchrun.
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
    sizes = {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 1))
    return (name, size) if size > 1 else ("", 1)


@cache
def default_communicator() -> DefaultCommunicator:
    """The one handle of the default communicator."""
    return DefaultCommunicator()


@cache
def _default_group() -> Communicator:
    # By name: torch need not be installed.
    module = import_module("multibn.communicators.transports.torch_distributed")
    communicator: Communicator = module.TorchDistributed()
    return communicator


Handle.find_default = default_communicator
