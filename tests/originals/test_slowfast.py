"""SlowFast's training with our layers in the place of its own: the numbers of the original."""

from typing import Any

import pytest
import torch
from torch import nn

from multibn import torch_backend as tb
from tests.helpers.slowfast import SubBatchNorm
from tests.originals import slowfast

NEEDS = "torch dev"

DEFAULTS = {"NUM_SPLITS": 2, "NUM_SYNC_DEVICES": 1, "GLOBAL_SYNC": False}
NORM_TYPES = ["batchnorm", "sub_batchnorm", "sync_batchnorm", "sync_batchnorm_apex"]
TRACKED = pytest.mark.parametrize("norm_type", ["sub_batchnorm", "sync_batchnorm"])


def models(norm_type: str, **bn: Any) -> Any:
    """SlowFast's model of a config, and ours."""
    cfg = {"BN": DEFAULTS | {"NORM_TYPE": norm_type} | bn}
    return slowfast.pair(slowfast.get_norm(cfg), tb.get_norm(cfg))


@pytest.mark.parametrize("frozen", [False, True])
@TRACKED
def test_the_training_order_gives_the_originals_numbers(norm_type: str, frozen: bool) -> None:
    """Train, fvcore's precise statistics, aggregate, evaluate; with MODEL.FROZEN_BN and without."""
    theirs, ours = models(norm_type)
    for model in (theirs, ours):  # something to be frozen
        slowfast.train(model, slowfast.data(epochs=1))
    results = [slowfast.train(m, slowfast.data(1), frozen=frozen) for m in (theirs, ours)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-10)
    counts = [r.tolist() for r in results[1] if r.shape == (2,)]
    layers = 2 if norm_type == "sub_batchnorm" else 0
    found = 0 if frozen else 2 + layers
    assert counts == [[found, layers]] * 2


@TRACKED
def test_a_multigrid_schedule_gives_the_originals_numbers(norm_type: str) -> None:
    """A new model for every stage, from a checkpoint as SlowFast saves it: of plain batch norms."""
    stages: list[dict[str, Any]] = [
        {"norm_type": norm_type},
        {"norm_type": "sub_batchnorm", "NUM_SPLITS": 4},
        {"norm_type": "batchnorm"},
        {"norm_type": norm_type},
    ]
    saved: list[Any] = []
    for number, stage in enumerate(stages):
        pair = models(**stage)
        results = []
        for k, model in enumerate(pair):
            if saved:
                load_normal_bn(model, saved[k])
            results.append(slowfast.train(model, slowfast.data(number, epochs=1)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
        saved = [slowfast.sub_to_normal_bn(model.state_dict()) for model in pair]
        torch.testing.assert_close(saved[1], saved[0], rtol=1e-9, atol=1e-9)


def load_normal_bn(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """slowfast/utils/checkpoint.py:587 for SlowFast's layers; ours load the state as it is."""
    if any(isinstance(m, SubBatchNorm) for m in model.modules()):
        splits: Any = model.get_submodule("a_bn").num_splits
        for key in model.state_dict():
            plain = state.get(key.replace(".split_bn.", ".").replace(".bn.", "."))
            assert plain is not None
            state[key] = plain.repeat(splits) if "split_bn.running" in key else plain
        state = {key: state[key] for key in model.state_dict()}
    model.load_state_dict(state, strict=True)


@pytest.mark.parametrize("zero_init", [True, False])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_initialization_by_class_finds_the_same_layers(norm_type: str, zero_init: bool) -> None:
    """MODEL.ZERO_INIT_FINAL_BN; the original's sub-batch norm is not found, and neither is ours."""
    weights = []
    for model in models(norm_type):
        slowfast.init_weights(model, zero_init)
        weights.append([model.stem_bn.weight.tolist(), model.a_bn.weight.tolist()])
    assert weights[1] == weights[0]
    is_zero = zero_init and norm_type != "sub_batchnorm"
    assert weights[1][1] == [0.0 if is_zero else 1.0] * slowfast.C
