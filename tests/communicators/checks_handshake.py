"""Names and options decide which layers meet; copies on one rank alone disturb nobody."""

import copy
import gc
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from multibn import torch_backend
from multibn.chainer_backend.links import LinkOptions, MultiNodeBatchNormalization
from multibn.communicators import Communicator
from tests.communicators.phases import new_group
from tests.harness.runs import on, only
from tests.helpers.spread import OTHERS

import chainer  # isort: skip (multibn makes it importable)

RUNS = on("torchrun mpiexec", 2, 3, needs="torch chainer")


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


def check_a_copy_goes_on_in_its_originals_place(world: Communicator) -> None:
    """The copy may be of one rank alone, made before the first step or later."""
    for make in _COPIES.values():
        models: list[Any] = [_network(world), _network(world)]
        for _ in range(2):
            if world.rank == 1:
                models[0] = make(models[0])
            _expect_right(models)


def check_the_first_layer_of_a_group_is_compared_once(world: Communicator) -> None:
    group = world.split(0)
    _trained_layer(group)
    assert group.channel.num_first_messages == 1  # type: ignore[attr-defined]


def check_a_copy_has_its_originals_place_in_any_model(world: Communicator) -> None:
    """One rank alone copies its layer, and calls it without a model, or in one of its own."""
    x = np.arange(8, dtype="f").reshape(4, 2) + world.rank
    for make, start in itertools.product(_COPIES.values(), range(3)):
        layers: list[tuple[Any, Any, Any, Any]] = [
            (
                torch_backend.SyncBatchNorm(2, momentum=1.0, process_group=world),
                nn,
                nn.Identity(),
                torch.tensor(x),
            ),
            (
                MultiNodeBatchNormalization(2, world, decay=0.0),
                chainer,
                chainer.functions.identity,
                x,
            ),
        ]
        for layer, library, identity, own in layers:
            _call_in_unlike_models(layer, make, library.Sequential, identity, own, start)


def _call_in_unlike_models(
    layer: Any, make: Any, sequential: Any, identity: Any, x: Any, start: int
) -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda layer: layer,
        sequential,
        lambda layer: sequential(sequential(layer)),
        lambda layer: sequential(identity, layer),  # a name of its own: after the first step
    ]
    rank, size = layer.layer_communicator.rank, layer.layer_communicator.size
    with pytest.raises((ValueError, RuntimeError), match=r"shape|rejected on rank\(s\) \[1\]"):
        layer(x[..., :1] if rank == 1 else x)  # a rejected input, before the layers meet
    for n in range(8):
        if rank == 1:
            layer = make(layer)
        ways[(start + n + (rank == 1)) % (4 if n else 3)](layer)(x + n)
        mean = layer.running_mean if hasattr(layer, "running_mean") else layer.avg_mean
        np.testing.assert_allclose(mean, np.array([3.0, 4.0]) + n + (size - 1) / 2)


def check_other_models_of_one_rank_disturb_nobody(world: Communicator) -> None:
    """Some are built, and some trained, before the model of all ranks; some are deleted."""
    alone = world.split(world.rank)
    for _ in range(2):
        others = [_network(alone), _network(world)] if world.rank == 1 else []
        for other in others[:1]:
            _means([other])
        models = [_network(world), _network(world)]
        del others[1:]
        _expect_right(models)


def check_layers_are_built_in_any_order(world: Communicator) -> None:
    """A walk over a set has another order on each rank; a layer may have several names in it."""
    keys = ("day", "dusk", "night")[:: 1 if world.rank == 1 else -1]
    shared = torch_backend.SyncBatchNorm(2, process_group=world)
    norms: Any = {key: torch_backend.SyncBatchNorm(2, process_group=world) for key in keys}
    models: list[Any] = [nn.ModuleDict(norms), nn.ModuleDict(dict.fromkeys(keys, shared))]
    for model in models:
        model.forward = lambda x, model=model: [model[key](x) for key in sorted(keys)]
        for n in range(3):
            model(torch.full((4, 2), float(world.rank + n)))
    expected = (world.size - 1) / 2
    first, again = (float(model["day"].running_mean[0]) for model in models)
    np.testing.assert_allclose(first, sum(0.1 * 0.9 ** (2 - n) * (expected + n) for n in range(3)))
    assert np.isfinite(again)
    assert {name.layer_communicator.name for name in norms.values()} == {*keys}
    assert shared.layer_communicator.name == "day"


def check_links_are_built_in_any_order(world: Communicator) -> None:
    keys = ("day", "dusk", "night")[:: 1 if world.rank == 1 else -1]

    class Chain(chainer.Chain):
        def forward(self, x: Any) -> list[Any]:
            return [self[key](x) for key in sorted(keys)]

    chain = Chain()
    with chain.init_scope():
        for key in keys:
            setattr(chain, key, MultiNodeBatchNormalization(2, world))
    for _ in range(2):
        chain(np.ones((4, 2), "f"))
    assert [chain[key].layer_communicator.name for key in keys] == [*keys]


@only(sizes=(3,))
def check_a_part_of_the_ranks_has_compiled_layers_before(world: Communicator) -> None:
    """Their width is a later layer's of all ranks; torch's graph or the program keeps theirs."""
    part = world.split(world.rank // 2)
    kept = []
    for keeps in (False, True):
        if world.rank < 2:
            layer = _network(part)
            torch.compile(layer, backend="eager")(torch.ones(4, 2))
            kept += [layer] * keeps
        _expect_right([_network(world), _network(world)])


def check_one_rank_may_wrap_its_blocks(world: Communicator) -> None:
    """Its names have the wrapper's; the layers are those of the other ranks."""
    wrappers: list[Callable[[nn.Module], Any]] = [
        nn.DataParallel,
        partial(torch.compile, backend="eager"),
        partial(checkpoint_wrapper, context_fn=torch_backend.checkpoint_contexts),
    ]
    for wrap in wrappers:
        block = _network(world)
        model = nn.Sequential(nn.Identity(), wrap(block) if world.rank == 1 else block)
        for n in range(2):
            model(torch.full((4, 2), float(n)) + torch.arange(4.0)[:, None]).sum().backward()
            assert float(block[1].running_mean[0]) == 1.5 + n  # type: ignore[index]
        assert block[1].layer_communicator.name == "1.1"  # type: ignore[index]


def _trained_link(group: Communicator) -> object:
    link = MultiNodeBatchNormalization(2, group)
    link(np.arange(8, dtype="f").reshape(4, 2))
    return link


def _trained_layer(group: Communicator) -> object:
    model = _network(group)
    model(torch.arange(8.0).reshape(4, 2).requires_grad_()).sum().backward()
    return model


def check_nothing_lives_on_of_layers_over_some_ranks(world: Communicator) -> None:
    alive: list[Any] = []
    for trained in (_trained_layer, _trained_link):
        for left_out in (0, world.size - 1):
            group = world.split(world.rank == left_out)
            if world.rank != left_out:
                alive.append(weakref.ref(trained(group)))
            gc.collect()
            trained(world)
            gc.collect()
    assert not [each for each in alive if each()]


def check_models_that_change_places_later_are_an_error(world: Communicator) -> None:
    models = [_network(world), _network(world)]
    _expect_right(models)
    with pytest.raises(RuntimeError, match=r"layer .* in call order; .* in call order"):
        _means(models[::-1] if world.rank == 1 else models)


def check_a_model_that_one_rank_builds_again_is_an_error(world: Communicator) -> None:
    """A copy of its model, and a state dict that it loads, are none."""
    models = [_network(world)]
    _expect_right(models)
    if world.rank == 1:
        models[0].load_state_dict(_network(world).state_dict())
        models = [copy.deepcopy(models[0])]
    _expect_right(models)
    with pytest.raises(RuntimeError, match="in the first message of layer 1"):
        _means([_network(world)] if world.rank == 1 else models)


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
    """Each option of the record; and set on all ranks, the layer goes on, with any batches."""
    x = torch.randn(8, 2)
    for name, values in OTHERS.items():
        attribute = torch_backend.SyncBatchNorm.Options.attributes.get(name, name)
        for value in values:
            layer: Any = torch_backend.SyncBatchNorm(2, process_group=world)
            set_to = None if name == "bias" else value
            for _ in range(2):
                layer(x)
            if world.rank == 1:
                setattr(layer, attribute, set_to)
            with pytest.raises(ValueError, match=rf"\[1\] with {name}={value}. Build the same"):
                layer(x)
            setattr(layer, attribute, set_to)
            for n in range(2):
                layer(x[: 4 if world.rank == n else 8]).sum().backward()


def check_an_option_that_links_get_later_on_one_rank_is_an_error_on_all(
    world: Communicator,
) -> None:
    x = np.random.default_rng(0).normal(size=(4, 2)).astype("f")
    later = {"decay": 0.5, "avg_var": "biased", "use_gamma": None, "use_beta": None}
    later |= {"axis": (0,), "dtype": np.dtype("f2")}
    for name in (field.name for field in fields(LinkOptions)):
        value: Any = later[name] if name in later else OTHERS[name][0]
        attribute = LinkOptions.attributes.get(name, name)
        link = MultiNodeBatchNormalization(2, world)
        for _ in range(2):
            link(x)
        if world.rank == 1:
            setattr(link, attribute, value)
        with pytest.raises(ValueError, match=rf"\[1\] with {name}="):
            link(x)
        setattr(link, attribute, value)
        link(x)


def check_an_option_of_one_call_is_an_error_on_all(world: Communicator) -> None:
    """Also of a function that the ranks have called with like options before."""
    x = torch.randn(4, 2)
    keywords = inspect.getfullargspec(torch_backend.sync_batch_norm).kwonlyargs
    of_arrays = {"running_mean", "running_var", "momentum"}  # they have a check of their own
    for name in [name for name in keywords if name in OTHERS.keys() - of_arrays]:
        for value in OTHERS[name]:
            torch_backend.sync_batch_norm(x, process_group=world)
            torch_backend.sync_batch_norm(x, process_group=world, **{name: value})
            given = {name: value} if world.rank == 1 else {}
            message = rf"\[1\] with {name}={value}. Build the same model"
            with pytest.raises(ValueError, match=message):
                torch_backend.sync_batch_norm(x, process_group=world, **given)


def check_functions_use_the_very_group_of_the_layers(world: Communicator) -> None:
    """Another process group of the same ranks, so that a rank in `check_sync` meets the others."""
    model = torch_backend.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), new_group(world))
    model(torch.arange(4.0).reshape(2, 2))
    call: Any = torch_backend.check_sync if world.rank else lambda net: net(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"different places: .*\(forward, .*check_sync"):
        call(model)
    torch_backend.check_sync(model)
