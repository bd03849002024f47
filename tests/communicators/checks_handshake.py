"""Two models of one architecture are told apart; copies on one rank alone disturb nobody."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import nn

from multibn import torch_backend
from multibn.communicators import Communicator
from multibn.communicators.handshake import LayerId
from multibn.options import NormOptions
from tests.harness.runs import on
from tests.helpers import require
from tests.helpers.spread import OTHERS

RUNS = on("torchrun mpiexec", 2, 3, needs="torch")


def _network(world: Communicator) -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(2, momentum=1.0))
    return torch_backend.convert_sync_batchnorm(model, world)


def _means(models: Sequence[nn.Module]) -> list[float]:
    """The models' means after a step of each over the batches that belong to it."""
    for number, model in enumerate(models):
        model(torch.full((4, 2), 100.0 * number) + torch.arange(4.0)[:, None])
    return [float(model[1].running_mean[0]) for model in models]  # type: ignore[index]


def _expect_right(models: Sequence[nn.Module]) -> None:
    for _ in range(2):
        assert _means(models) == [1.5 + 100.0 * n for n in range(len(models))]


@contextlib.contextmanager
def _numbers_restored() -> Iterator[None]:
    """Other checks share the processes; some have built, and keep, layers on one rank alone."""
    before = LayerId.num_layers, LayerId._alive
    LayerId._alive = WeakSet()
    try:
        yield
    finally:
        LayerId.num_layers, LayerId._alive = before


_COPIES: dict[str, Callable[[nn.Module], object]] = {
    "a deep copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def check_copies_on_one_rank_alone_disturb_nobody(world: Communicator) -> None:
    """A copy for averages over steps, for example, has no part in any message."""
    for make in _COPIES.values():
        models = [_network(world)]
        kept = make(models[0]) if world.rank == 1 else None
        models += [_network(world), copy.deepcopy(models[0])]
        _expect_right(models)
        del kept


def check_a_model_that_one_rank_has_deleted_disturbs_nobody(world: Communicator) -> None:
    with _numbers_restored():
        if world.rank == 1:
            _network(world)
        _expect_right([_network(world), _network(world)])


def _trained_link(group: Communicator) -> object:
    from multibn.chainer_backend import MultiNodeBatchNormalization

    link = MultiNodeBatchNormalization(2, group)
    link(np.arange(8, dtype="f").reshape(4, 2))
    return link


def _trained_layer(group: Communicator) -> object:
    model = _network(group)
    model(torch.arange(8.0).reshape(4, 2).requires_grad_()).sum().backward()
    return model


def check_nothing_lives_on_of_layers_over_some_ranks(world: Communicator) -> None:
    """Neither the layers nor their numbers, in which a later model of all ranks would differ."""
    alive: list[Any] = []
    with _numbers_restored():
        for trained in (_trained_layer, _trained_link)[: 1 + require.available("chainer")]:
            for left_out in (0, world.size - 1):
                group = world.split(world.rank == left_out)
                if world.rank != left_out:
                    alive.append(weakref.ref(trained(group)))
                gc.collect()
                alive += LayerId._alive
                trained(world)
                gc.collect()
    assert not [each for each in alive if not isinstance(each, weakref.ref) or each()]


def check_a_model_that_one_rank_unpickled_disturbs_nobody(world: Communicator) -> None:
    """A rank goes on with a pickle, and another with the model that was pickled."""
    with _numbers_restored():
        model = _network(world)
        if world.rank == 1:
            model = pickle.loads(pickle.dumps(model))
        _expect_right([model])


def check_another_model_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    with _numbers_restored():
        further = [_network(world)] if world.rank == 1 else []
        model = _network(world)
        with pytest.raises(RuntimeError, match="ranks are in different models, at layer 1: ") as e:
            _means([model])
        further.clear()
    assert f"rank(s) {[r for r in range(world.size) if r != 1]} in the layer built as " in str(e)
    assert "Build a model that one rank alone needs after the others, or copy it from" in str(e)


def check_a_copy_in_its_originals_place_is_an_error_on_all(world: Communicator) -> None:
    student = _network(world)
    models = [student, copy.deepcopy(student)]
    with pytest.raises(RuntimeError, match="in a copy of the layer built as number"):
        _means(models[::-1] if world.rank == 1 else models)


def check_models_that_change_places_later_are_an_error(world: Communicator) -> None:
    models = [_network(world), _network(world)]
    _expect_right(models)
    with pytest.raises(RuntimeError, match=r"layer .* by the first call; .* by the first call"):
        _means(models[::-1] if world.rank == 1 else models)


def check_an_option_that_differs_is_an_error_on_all(world: Communicator) -> None:
    """Each option that the record names: with both values, by a first message and `check_sync`."""
    for name, values in OTHERS.items():
        of_parts = name == "num_splits"
        make: Any = torch_backend.SubBatchNorm1d if of_parts else torch_backend.SyncBatchNorm
        for value in values:
            options = {"num_splits": 1} if of_parts else {}
            options |= {name: value} if world.rank == 1 else {}
            layer = make(num_features=2, process_group=world, **options)
            with pytest.raises(ValueError, match=r"built \w*BatchNorm\w* differently: ") as raised:
                layer(torch.ones(4, 2))
            assert str(raised.value).count(f"{name}=") == 2, raised.value
            with pytest.raises(RuntimeError, match=f"{name}={value}"):
                torch_backend.check_sync(nn.Sequential(layer), world)


def check_an_option_set_later_on_one_rank_is_an_error_on_all(world: Communicator) -> None:
    """Each option that changes the output; and set on all ranks, the layer goes on."""
    x = torch.randn(4, 2)
    for name in (field.name for field in fields(NormOptions) if field.name != "nonfinite"):
        for value in OTHERS[name]:
            layer = torch_backend.SyncBatchNorm(2, process_group=world)
            for _ in range(2):
                layer(x)
            if world.rank == 1:
                setattr(layer, name, value)
            with pytest.raises(ValueError, match=rf"\[1\] with {name}={value}. Build the same"):
                layer(x)
            setattr(layer, name, value)
            layer(x)


def check_an_option_of_one_call_is_an_error_on_all(world: Communicator) -> None:
    """Also of a function that the ranks have called with like options before."""
    x = torch.randn(4, 2)
    for name in (field.name for field in fields(NormOptions) if field.name != "fuse_relu"):
        for value in OTHERS[name]:
            torch_backend.sync_batch_norm(x, process_group=world)
            torch_backend.sync_batch_norm(x, process_group=world, **{name: value})
            options = {name: value} if world.rank == 1 else {}
            message = rf"\[1\] with {name}={value}. Build the same model"
            with pytest.raises(ValueError, match=message):
                torch_backend.sync_batch_norm(x, process_group=world, **options)
