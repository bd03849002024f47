"""The conversion of group and instance norms, and the way back."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import fx, nn

from multibn import SingleProcess
from multibn.torch_backend import convert_sync_groupnorm, revert_sync_batchnorm

NEEDS = "torch"


class Own(nn.GroupNorm):
    """A class of a project's own."""


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Flatten(2),
        nn.InstanceNorm1d(4),
        nn.BatchNorm1d(4),
    ).double()


def test_a_model_is_converted_and_reverted() -> None:
    original, plain = model(), model()
    converted = convert_sync_groupnorm(model(), strict=True)
    kinds = [type(m).__name__ for m in converted if "Sync" in type(m).__name__]
    assert kinds == ["SyncGroupNorm", "SyncInstanceNorm2d", "SyncInstanceNorm1d"]
    assert all(isinstance(m, type(o)) for m, o in zip(converted, original, strict=True))
    assert "momentum" not in repr(converted[1])
    assert repr(converted).replace("Sync", "") == repr(original)
    convert_sync_groupnorm(converted, SingleProcess())  # those that share stay
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    copies = [copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))]
    for other in (converted, *copies, fx.symbolic_trace(converted)):
        plain.load_state_dict(dict(other.state_dict()))
        torch.testing.assert_close(other.train()(x), plain.train()(x))
        torch.testing.assert_close(other.eval()(x), plain.eval()(x))
        torch.testing.assert_close(dict(other.state_dict()), dict(plain.state_dict()))
    sample = torch.randn(4, 5, 5).double()
    torch.testing.assert_close(converted[2].train()(sample), plain[2].train()(sample))
    reverted = revert_sync_batchnorm(converted)
    for part, own in zip(reverted, original, strict=True):
        assert type(part) is type(own)
        assert vars(part).keys() == vars(own).keys()


@pytest.mark.parametrize(
    "module, message",
    [
        (
            nn.Sequential(Own(1, 2)),
            "1 layer(s) cannot be converted, so that each rank normalizes only its part: "
            "0 (Own: a subclass of torch's layer)",
        ),
        (nn.Sequential(nn.BatchNorm1d(2)), "must have a group or instance norm of torch: got none"),
    ],
)
def test_what_cannot_be_converted_is_named(module: Any, message: str) -> None:
    pattern = re.escape(message)
    with pytest.warns(UserWarning, match=pattern):
        convert_sync_groupnorm(module)
    with pytest.raises(TypeError, match=pattern):
        convert_sync_groupnorm(module, strict=True)
