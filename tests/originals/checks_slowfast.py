"""SlowFast's training on several ranks: DistributedDataParallel, fvcore, the original's layers."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator
from multibn.torch_backend import get_norm
from tests.originals import slowfast

NAIVE: dict[str, Any] = {"weighting": "rank", "running_var": "biased"}


def _compare(world: Communicator, bn: dict[str, Any], **options: Any) -> None:
    cfg = {"BN": bn}
    models = slowfast.pair(slowfast.get_norm(cfg), partial(get_norm(cfg), **options))
    results = [
        slowfast.train(DistributedDataParallel(model), slowfast.data(world.rank))
        for model in models
    ]
    states = [
        {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
        for model in models
    ]
    counters = [m.num_batches_tracked for m in models[0].modules() if isinstance(m, nn.BatchNorm3d)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(states[1], states[0], rtol=1e-8, atol=1e-9)
    assert len(counters) == 2 * (1 + (bn["NORM_TYPE"] == "sub_batchnorm"))


def check_sub_batch_norm(world: Communicator) -> None:
    """Its statistics are those of each rank, as the original's are."""
    _compare(world, {"NORM_TYPE": "sub_batchnorm", "NUM_SPLITS": 2})


def check_naive_layers_in_groups(world: Communicator) -> None:
    for size in (1, world.size, 0):
        bn = {"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": size, "GLOBAL_SYNC": False}
        _compare(world, bn, **NAIVE)


def check_naive_layers_everywhere(world: Communicator) -> None:
    bn = {"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": None, "GLOBAL_SYNC": True}
    _compare(world, bn, **NAIVE)
