"""`get_norm` over every kind of config."""

import argparse
from dataclasses import make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from multibn.torch_backend import NaiveSyncBatchNorm3d, SubBatchNorm3d, SyncBatchNorm3d, get_norm

NEEDS = "torch"

CLASSES: dict[str, Any] = {
    "batchnorm": nn.BatchNorm3d,
    "sub_batchnorm": SubBatchNorm3d,
    "sync_batchnorm": NaiveSyncBatchNorm3d,
    "sync_batchnorm_apex": SyncBatchNorm3d,
}


def _dict(**bn: Any) -> Any:
    return {"BN": bn}


def _yacs(**bn: Any) -> Any:
    config = pytest.importorskip("yacs.config")
    return config.CfgNode({"BN": bn})


def _omegaconf(**bn: Any) -> Any:
    omegaconf = pytest.importorskip("omegaconf")
    return omegaconf.OmegaConf.create({"BN": bn})


def _omegaconf_struct(**bn: Any) -> Any:
    """One whose missing keys raise."""
    cfg = _omegaconf(**bn)
    pytest.importorskip("omegaconf").OmegaConf.set_struct(cfg, True)
    return cfg


def _namespace(**bn: Any) -> Any:
    return argparse.Namespace(BN=SimpleNamespace(**bn))


def _dataclass(**bn: Any) -> Any:
    names = [(name, Any) for name in bn]
    node = make_dataclass("Node", [*names, ("get", str, "an entry of this name")])
    return make_dataclass("Config", ["BN"])(node(**bn))


KINDS = pytest.mark.parametrize(
    "kind", [_dict, _yacs, _omegaconf, _omegaconf_struct, _namespace, _dataclass]
)


@pytest.mark.parametrize("norm_type", CLASSES)
def test_every_type_has_the_arguments_that_are_passed_on(norm_type: str) -> None:
    norm = get_norm(_dict(NORM_TYPE=norm_type))
    assert isinstance(norm, type) == (norm_type == "batchnorm")  # code of others looks at the class
    layer: Any = norm(num_features=3, eps=1e-3)
    assert type(layer) is CLASSES[norm_type]
    assert getattr(layer, "split_bn", layer).eps == 1e-3


@KINDS
def test_the_keys_are_read(kind: Any) -> None:
    bn = {"NUM_SPLITS": 2, "NUM_SYNC_DEVICES": 4, "GLOBAL_SYNC": False}
    norm = get_norm(kind(NORM_TYPE="sub_batchnorm", **bn))
    assert norm(num_features=3).num_splits == 2
    norm = get_norm(kind(NORM_TYPE="sync_batchnorm", **bn))
    assert isinstance(norm, partial)
    assert norm.keywords == {"num_sync_devices": 4, "global_sync": False}
    assert repr(norm(num_features=3).process_group).endswith("'machine'), 4)")
    norm = get_norm(kind(NORM_TYPE="sync_batchnorm_apex", **bn))
    assert repr(norm(num_features=3).process_group) == "Group(DefaultCommunicator(), 4)"
    norm = get_norm(kind(NORM_TYPE="sync_batchnorm", NUM_SYNC_DEVICES=None))
    assert repr(norm(num_features=3).process_group).endswith(", 'machine')")
    for norm_type, cls in CLASSES.items():  # keys that are missing have defaults
        assert type(get_norm(kind(NORM_TYPE=norm_type))(num_features=3)) is cls


@KINDS
def test_what_is_wrong_is_named(kind: Any) -> None:
    known = "'batchnorm', 'sub_batchnorm', 'sync_batchnorm', 'sync_batchnorm_apex'"
    wrong = (kind(NORM_TYPE="layernorm"), "'layernorm'"), (kind(NUM_SPLITS=2), "None")
    listed = kind(NORM_TYPE=["batchnorm"]), r"\['batchnorm'\]"  # cannot be hashed
    for cfg, got in (*wrong, listed, ({}, "None")):
        message = f"BN.NORM_TYPE` must be one of {known}: got {got}"
        with pytest.raises(NotImplementedError, match=message):  # as in PySlowFast
            get_norm(cfg)
    for no_config in ("batchnorm", {"BN": "batchnorm"}, {"BN": None}, SimpleNamespace(BN=1), 3):
        with pytest.raises(NotImplementedError, match=f"one of {known}: got None"):
            get_norm(no_config)
