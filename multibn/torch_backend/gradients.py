"""Averaging gradients over a communicator, for training without DistributedDataParallel."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multibn.torch_backend.participants import participants


@torch.no_grad()
def average_gradients(parameters: nn.Module | Iterable[Tensor], process_group: Any = None) -> None:
    """Replace each parameter's gradient by its mean over the ranks.

    What DistributedDataParallel does, over any communicator: MPI without torch.distributed, for
    example. Call it between backward() and the optimizer's step.
    Collective: every rank must call it, with the same parameters; one allreduce for each dtype
    and device.

    Parameters
    ----------
    parameters
        The model, or `model.parameters()`. Those that need no gradient are left out. A missing
        gradient counts as zeros, so that a rank that did not use a parameter can take part, and
        becomes a gradient of zeros if no rank used it.
    process_group
        The ranks that train together, anything that `multibn.as_communicator` takes. Default: the
        largest group of a model's synchronized layers, or torch's default process group if that is
        larger. Parameters do not tell of layers: for them it is torch's default process group.

    Raises
    ------
    ValueError
        If `process_group` is None and a launcher started several processes, but neither the model's
        layers nor torch.distributed tell of any other than this one.
    TypeError
        If a gradient is sparse.
    """
    model = nn.Module()
    if isinstance(parameters, nn.Module):
        model, parameters = parameters, parameters.parameters()
    communicator = participants(model, process_group)
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense: got layout {p.grad.layout} for a parameter of shape "
                f"{tuple(p.shape)}. Create the embedding with sparse=False."
            )
        if p.requires_grad:
            alike[p.dtype, p.device].append(p)
    for group in alike.values():
        flat = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in group]
        )
        mean = communicator.allreduce(flat / communicator.size)  # first: 16 bits overflow early
        for p, part in zip(group, mean.split([p.numel() for p in group]), strict=True):
            p.grad = part.view_as(p)
