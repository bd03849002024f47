"""Models as torch.func stacks them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import stack_module_state

C = 3  # channels


def stack_models(num_models: int, make_layer: Callable[[], nn.Module]) -> tuple[Any, Any, Any]:
    """A network with the layer, and the stacked parameters and buffers of so many such networks."""
    models = []
    for seed in range(num_models):
        torch.manual_seed(seed)
        first, last = nn.Linear(C, C), nn.Linear(C, 2)
        models.append(nn.Sequential(first, make_layer(), last).double())
    return models[0], *stack_module_state(models)
