"""Which ranks act on a model together, where the caller does not say."""

from collections.abc import Iterable

from multibn.communicators import Communicator, DefaultCommunicator, Group, SingleProcess
from multibn.communicators.default import launched_processes


def largest(groups: Iterable[Communicator], /, *, parameter: str) -> Communicator:
    """The one of `groups` with most ranks.

    Not collective. A `Group` counts as the communicator that it is a part of, because ranks that
    share statistics in parts still train one model.

    Parameters
    ----------
    groups
        The communicators of a model's layers, and others that come into question.
    parameter
        What the caller's parameter for a communicator is called, for the error message.

    Raises
    ------
    ValueError
        If none of `groups` names any process but this one, although a launcher started several.
    """
    candidates = [whole for group in groups if not _is_alone(whole := _whole(group))]
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


def _whole(group: Communicator) -> Communicator:
    while isinstance(group, Group):
        group = group.parent
    return group


def _is_alone(communicator: Communicator) -> bool:
    """Whether it stands for this process alone, whatever the launcher started."""
    if isinstance(communicator, DefaultCommunicator):  # its `size` would warn
        return communicator.default_group is None
    return isinstance(communicator, SingleProcess)
