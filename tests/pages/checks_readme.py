"""What README says of torch's own layer, where no GPU is needed to see it."""

import copy
import inspect
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from multibn.communicators import Communicator
from tests.harness.runs import on

RUNS = on("torchrun", 2, needs="torch")


class _WithRelu(nn.BatchNorm2d):
    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


def _error(function: Any, argument: Any) -> str:
    try:
        function(argument)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_torchs_own_layer_lacks_what_readme_says(world: Communicator) -> None:
    group = dist.new_group()
    layer = nn.SyncBatchNorm(3, process_group=group)
    on_cpu = _error(layer, torch.randn(4, 3))
    copied, pickled = _error(copy.deepcopy, layer), _error(pickle.dumps, layer)
    dist.barrier(group)  # gloo fails on a rank that still connects when its peer has gone
    dist.destroy_process_group(group)
    assert "ValueError: SyncBatchNorm expected input tensor to be on GPU" in on_cpu, on_cpu
    assert "TypeError: cannot pickle" in copied, copied
    assert "TypeError: cannot pickle" in pickled, pickled
    assert list(inspect.signature(layer.forward).parameters) == ["input"]  # no mask
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(_WithRelu(3))
    assert type(converted) is nn.SyncBatchNorm
    assert not [name for name in dir(nn.SyncBatchNorm) if "revert" in name]
