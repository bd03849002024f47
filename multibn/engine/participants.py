"""The ranks that act on a model together, if the caller does not name them."""

from collections.abc import Iterable

from multibn.communicators import Communicator, DefaultCommunicator, Group, SingleProcess
from multibn.communicators.default import launched_processes


def largest(groups: Iterable[Communicator], /, *, parameter: str) -> Communicator:
    """The largest of `groups`, the communicators of a model's layers. Not collective.

    A `Group` counts as its parent: ranks that share statistics in parts still train one model.
    Raises ValueError if every one of `groups` is this process alone, although a launcher started
    several; `parameter` is the name of the caller's argument, for the message.
    """
    candidates = []
    for group in groups:
        while isinstance(group, Group):
            group = group.parent
        if not _is_alone(group):
            candidates.append(group)
    if candidates:
        return max(candidates, key=lambda c: c.size)
    name, size = launched_processes()
    if size > 1:
        raise ValueError(
            f"`{parameter}` must say which ranks take part: got None, but the launcher started "
            f"{size} processes ({name}={size}), the model has no layer that shares statistics with "
            "another, and torch.distributed is not initialised. Pass a communicator, "
            "mpi4py.MPI.COMM_WORLD for example, or call torch.distributed.init_process_group() "
            "before. To act on this process alone, pass multibn.SingleProcess()."
        )
    return SingleProcess()


def _is_alone(communicator: Communicator) -> bool:
    if isinstance(communicator, DefaultCommunicator):  # whose `size` would warn
        return communicator.default_group is None
    return isinstance(communicator, SingleProcess)
