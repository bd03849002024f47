"""SlowFast's training on several ranks, with DistributedDataParallel and fvcore."""

from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from multibn.communicators import Communicator
from multibn.torch_backend import get_norm
from tests.harness.runs import on
from tests.originals import slowfast

RUNS = on("torchrun", 2, needs="torch dev")

NAIVE: dict[str, Any] = {"weighting": "rank", "running_var": "biased"}


def _train(world: Communicator, bn: dict[str, Any], **options: Any) -> Any:
    """Our model after training, with the numbers of the original."""
    cfg = {"BN": bn}
    models = slowfast.pair(slowfast.get_norm(cfg), partial(get_norm(cfg), **options))
    results = []
    for model in models:
        seen = slowfast.train(DistributedDataParallel(model), slowfast.data(world.rank))
        state = model.state_dict()
        if bn["NORM_TYPE"] == "sync_batchnorm":  # the original counts in one process only
            state = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
        results.append([seen, state])
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-9)
    return models[1]


def check_sub_batch_norm_has_the_statistics_of_one_rank(world: Communicator) -> None:
    model = _train(world, {"NORM_TYPE": "sub_batchnorm", "NUM_SPLITS": 2})
    assert model.stem_bn.layer_communicator.size == 1


def check_naive_layers_share_in_groups(world: Communicator) -> None:
    for size, expected in ((1, 1), (world.size, world.size), (0, world.size)):
        bn = {"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": size, "GLOBAL_SYNC": False}
        model = _train(world, bn, **NAIVE)
        assert model.stem_bn.layer_communicator.size == expected
        bn = model.stem_bn
        found = bn.global_sync, bn.num_sync_devices, bn.num_groups
        assert found == (False, expected, world.size // expected)
        assert bn.num_batches_tracked == 2 * (3 + 3)  # 2 epochs of training and of `precise_bn`


def check_naive_layers_share_over_all_ranks(world: Communicator) -> None:
    bn = {"NORM_TYPE": "sync_batchnorm", "NUM_SYNC_DEVICES": None, "GLOBAL_SYNC": True}
    layer = _train(world, bn, **NAIVE).stem_bn
    assert layer.layer_communicator.size == world.size
    assert (layer.global_sync, layer.num_sync_devices, layer.num_groups) == (True, world.size, 1)
