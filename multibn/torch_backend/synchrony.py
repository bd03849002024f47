"""Whether the ranks' models are still the same."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from multibn.synchrony import check_equal
from multibn.torch_backend.participants import participants


def check_sync(model: nn.Module, process_group: Any = None, *, ignore: Iterable[str] = ()) -> None:
    """Raise on all ranks unless they hold the same model, bit for bit.

    After data-parallel training every rank has the same parameters and, where batch statistics are
    shared, the same buffers; what is left of a difference is found here, before it is saved.
    Collective: every rank must call it, with one allreduce of 32 numbers if all is well, whatever
    the size of the model. Copies the model to host memory, so call it once an epoch rather than in
    every step.

    Parameters
    ----------
    model
        Its parameters and buffers are compared, under the names of its state dict. They must not
        be sharded.
    process_group
        The ranks that are compared, anything that `multibn.as_communicator` takes. Default: those
        of a DistributedDataParallel in the model; else the largest group of its synchronized
        layers, or torch's default process group if that is larger.
    ignore
        Names to leave out, with wildcards: `["*.running_*", "*.num_batches_tracked"]` for batch
        norms that do not share statistics.

    Raises
    ------
    ValueError
        If `process_group` is None and a launcher started several processes, but neither the model's
        layers nor torch.distributed tell of any other than this one.
    RuntimeError
        On all ranks: with the names, ranks and largest differences from rank 0, if values differ;
        with what is there and what is missing, if the models are not built alike.

    See Also
    --------
    sync_running_stats : makes running statistics equal.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    arrays = {name: None if is_lazy(t) else t for name, t in named}
    check_equal(arrays, participants(model, process_group), ignore=ignore)
