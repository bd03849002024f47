"""What batch renormalization shares with batch norm, and what it refuses."""

import pytest
import torch
from torch import nn

from multibn import SingleProcess
from multibn.torch_backend import (
    SyncBatchRenorm1d,
    SyncBatchRenorm2d,
    convert_sub_batchnorm,
    revert_sync_batchnorm,
)

NEEDS = "torch"


def test_a_state_of_batch_norm_loads_and_evaluates_alike() -> None:
    plain, layer = nn.BatchNorm2d(3), SyncBatchRenorm2d(3, process_group=SingleProcess())
    x = torch.randn(4, 3, 5, 5)
    plain(x + 1)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))
    # Until the schedule begins, training is batch norm's, too.
    torch.testing.assert_close(layer.train()(x), plain.train()(x))


def test_it_neither_splits_nor_reverts() -> None:
    for convert in (lambda m: convert_sub_batchnorm(m, 2), revert_sync_batchnorm):
        with pytest.warns(UserWarning, match="it renormalizes its batch, which would be lost"):
            convert(nn.Sequential(SyncBatchRenorm1d(2)))


def test_options_are_shown_and_checked() -> None:
    assert "rmax=2.0, schedule=(0, 0, 0)" in repr(
        SyncBatchRenorm1d(2, rmax=2.0, schedule=(0, 0, 0))
    )
