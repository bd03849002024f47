"""Population statistics of models: `update_bn_stats` of torch, and fine-tuning of Chainer."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multibn import SingleProcess, chainer_backend, torch_backend
from tests.helpers.normalized import normalized
from tests.helpers.ranks import CountingCommunicator, ThreadCommunicator, run_ranks

import chainer  # isort: skip (multibn makes it importable)
from chainer import functions as F  # isort: skip

NEEDS = "torch chainer"

C = 3
LOCAL = SingleProcess()


class Torch:
    eps, loader = 1e-5, "data_loader"

    def layer(self, communicator: Any = None) -> Any:
        """A plain layer, or one that shares its statistics."""
        if communicator is None:
            return nn.BatchNorm1d(C, dtype=torch.float64)
        return torch_backend.SyncBatchNorm(C, process_group=communicator, dtype=torch.float64)

    def model(self, communicator: Any = None) -> Any:
        """Two layers, `a` and `b`, random numbers, and state of another kind."""
        a, b = (self.layer(communicator) for _ in range(2))

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = a, b
                self.calls: Any
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Any) -> Any:
                self.calls = self.calls + 1  # another tensor
                return nn.functional.dropout(self.b(self.a(x).relu() ** 2))

        return Net()

    def run(self, data: Iterable[Any], target: Any, comm: Any = None, **options: Any) -> None:
        options["forward_fn"] = options.pop("forward", None)
        loader: Any = Converted(data, torch.from_numpy)
        options = {"process_group": comm, "progress": False} | options
        torch_backend.update_bn_stats(target, loader, **options)

    def kept(self, layer: Any) -> tuple[Any, Any]:
        return layer.running_mean.numpy(), layer.running_var.numpy()

    def state(self, model: Any) -> dict[str, Any]:
        return {
            **{name: t.numpy().copy() for name, t in model.state_dict().items()},
            "modes": [(m.training, getattr(m, "momentum", None)) for m in model.modules()],
            "hooks": [
                {name: dict(hooks) for name, hooks in vars(m).items() if "_hooks" in name}
                for m in model.modules()
            ],
            "buffers": [id(b) for b in model.buffers()],
            "random numbers": torch.get_rng_state().numpy(),
        }


class Chainer:
    eps, loader = 2e-5, "iterator"

    def layer(self, communicator: Any = None) -> Any:
        if communicator is None:
            return chainer.links.BatchNormalization(C, dtype=np.float64)
        return chainer_backend.MultiNodeBatchNormalization(C, communicator, dtype=np.float64)

    def model(self, communicator: Any = None) -> Any:
        a, b = (self.layer(communicator) for _ in range(2))

        class Net(chainer.Chain):
            def __init__(self) -> None:
                super().__init__()
                with self.init_scope():
                    self.a, self.b = a, b
                self.calls = np.zeros(1)
                self.register_persistent("calls")

            def forward(self, x: Any) -> Any:
                self.calls += 1
                return F.dropout(self.b(F.relu(self.a(x)) ** 2))

        return Net()

    def run(self, data: Iterable[Any], target: Any, comm: Any = None, **options: Any) -> None:
        if forward := options.pop("forward", None):
            options["eval_func"] = lambda x: forward(target, x)
        options = {"converter": None, "progress": False} | options
        chainer_backend.FinetunePopulationStatistics(data, target, comm, **options)()

    def kept(self, layer: Any) -> tuple[Any, Any]:
        return layer.avg_mean, layer.avg_var

    def state(self, model: Any) -> dict[str, Any]:
        values = {
            f"{path}/{name}": copy.deepcopy(getattr(link, name))
            for path, link in model.namedlinks()
            for name in link._persistent
        }
        config = chainer.config
        values["modes"] = config.train, config.enable_backprop, config.dtype
        values["random numbers"] = np.random.get_state()  # noqa: NPY002
        values["hooks"] = [dict(link.local_link_hooks) for _, link in model.namedlinks()]
        return values


class Converted:
    """The batches of a loader, converted one by one."""

    def __init__(self, data: Iterable[Any], convert: Callable[[Any], Any]) -> None:
        self.data, self.convert = data, convert

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.data)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # TypeError without one, as of generators


class Interrupting:
    """Gives one batch, then raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield batches()[0]
        raise self.error


@pytest.fixture(params=[Torch, Chainer])
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param()


def batches(sizes: Sequence[int] = (4, 6, 1), seed: int = 0) -> list[Any]:
    """Batches of unequal sizes, means and scales."""
    rng = np.random.default_rng(seed)
    return [rng.normal(i, 1 + i, (n, C, 2 + i)) for i, n in enumerate(sizes)]


def rows(xs: Sequence[Any]) -> Any:
    """All elements, `(C, total)`."""
    return np.concatenate([np.moveaxis(x, 1, 0).reshape(C, -1) for x in xs], axis=1)


def assert_population(framework: Any, layer: Any, xs: Sequence[Any]) -> None:
    mean, var = framework.kept(layer)
    np.testing.assert_allclose(mean, rows(xs).mean(1), rtol=1e-10)
    np.testing.assert_allclose(var, rows(xs).var(1, ddof=1), rtol=1e-10)


def second_inputs(framework: Any, steps: Sequence[Sequence[Any]]) -> list[Any]:
    """Inputs of `b`, if the batches of each step share the statistics of `a`."""
    outputs = [y for step in steps for y in normalized(step, framework.eps)]
    return [np.maximum(y, 0) ** 2 for y in outputs]


def without_statistics(state: dict[str, Any]) -> dict[str, Any]:
    moved = ("running_mean", "running_var", "avg_mean", "avg_var", "/N")
    return {name: value for name, value in state.items() if not name.endswith(moved)}


@pytest.mark.parametrize("communicator", [None, LOCAL], ids=["plain", "shared"])
def test_unequal_batches_give_the_population_of_all_data(framework: Any, communicator: Any) -> None:
    model, data = framework.model(communicator), batches()
    before = framework.state(model)
    framework.run(data, model)
    assert_population(framework, model.a, data)
    assert_population(framework, model.b, second_inputs(framework, [[x] for x in data]))
    np.testing.assert_equal(without_statistics(framework.state(model)), without_statistics(before))


@pytest.mark.parametrize("communicator", [None, LOCAL], ids=["plain", "shared"])
def test_a_shallow_copy_has_a_population_of_its_own(framework: Any, communicator: Any) -> None:
    model, data = framework.model(communicator), batches()
    model.b = copy.copy(model.a)
    if hasattr(model.b, "_buffers"):
        model.b._buffers = copy.deepcopy(model.a._buffers)
    else:
        model.b.avg_mean, model.b.avg_var = copy.deepcopy(framework.kept(model.a))
    framework.run(data, model)
    assert_population(framework, model.a, data)
    assert_population(framework, model.b, second_inputs(framework, [[x] for x in data]))


def test_a_layer_that_is_used_twice_counts_both_inputs(framework: Any) -> None:
    layer, data = framework.layer(LOCAL), batches()
    framework.run(data, layer, forward=lambda layer, x: (layer(x), layer(3 * x + 1)))
    assert_population(framework, layer, [f for x in data for f in (x, 3 * x + 1)])


@pytest.mark.parametrize("communicator", [None, LOCAL], ids=["plain", "shared"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("in_model", [True, False])
def test_an_error_leaves_everything_as_it_was(
    framework: Any, communicator: Any, error: BaseException, in_model: bool
) -> None:
    def forward(model: Any, x: Any) -> None:
        model(x)
        if in_model:
            raise error

    model = framework.model(communicator)
    before = framework.state(model)
    with pytest.raises(type(error)):
        framework.run(batches() if in_model else Interrupting(error), model, forward=forward)
    np.testing.assert_equal(framework.state(model), before)


def test_no_batch_is_an_error(framework: Any) -> None:
    layer = framework.layer()
    before = framework.state(layer)
    used_up = iter(batches())
    list(used_up)
    loaders: list[Any] = [[], used_up]
    for data in loaders:
        with pytest.raises(ValueError, match=r"at least one batch: got none on rank\(s\) \[0\]"):
            framework.run(data, layer)
    np.testing.assert_equal(framework.state(layer), before)


def test_a_step_sends_two_numbers_and_a_layer_one_message(framework: Any) -> None:
    counting = CountingCommunicator(LOCAL)
    framework.run(batches(), framework.model(), counting)
    assert counting.take() == [2] * 4 + [2 * C + 2] * 2


def test_plain_layers_get_the_population_of_unlike_loaders(framework: Any) -> None:
    data = [batches(), [], batches((3,), seed=1)]

    def rank(world: ThreadCommunicator) -> Any:
        layer = framework.layer()
        framework.run(data[world.rank], layer, world)
        return layer

    for layer, of_rank in zip(run_ranks(3, rank), data, strict=True):
        assert_population(framework, layer, [x for of_rank in data for x in of_rank])
        assert getattr(layer, "N", 3) == 3 or not of_rank  # Chainer's, of a rank that has ended too


def test_shared_layers_get_the_population_of_unlike_loaders(framework: Any) -> None:
    data = [batches((2,)), batches((3,), seed=1), batches((4, 6, 1), seed=2)]

    def rank(world: ThreadCommunicator) -> Any:
        model = framework.model(world)
        framework.run(data[world.rank], model, world)
        return model

    steps = [[of_rank[i] for of_rank in data if i < len(of_rank)] for i in range(3)]
    for model in run_ranks(3, rank):
        assert_population(framework, model.a, [x for of_rank in data for x in of_rank])
        assert_population(framework, model.b, second_inputs(framework, steps))
        assert getattr(model.a, "N", 3) == 3


@pytest.mark.parametrize("bad", ["raises", "is empty"])
def test_an_error_of_one_rank_is_an_error_of_all(framework: Any, bad: str) -> None:
    def rank(world: ThreadCommunicator) -> None:
        model = framework.model(world)
        before = framework.state(model)
        data: Any = batches()
        if world.rank == 1:
            data = Interrupting(OSError("disk")) if bad == "raises" else []
        expected = (ValueError, r"none on rank\(s\) \[1\] of 2")
        if bad == "raises":
            others = (RuntimeError, rf"`{framework.loader}`.* raised on rank\(s\) \[1\] of 2")
            expected = (OSError, "disk") if world.rank == 1 else others  # type: ignore[assignment]
        with pytest.raises(expected[0], match=expected[1]):
            framework.run(data, model, world)
        np.testing.assert_equal(framework.state(model), before)

    run_ranks(2, rank)


def test_a_progress_bar_is_shown_on_request(framework: Any, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("tqdm")
    framework.run(batches(), framework.layer(), progress=True)
    shown = capsys.readouterr().err
    assert ": 100%" in shown
    assert "3/3" in shown
    framework.run(batches(), framework.layer())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.modules["multibn.engine.precise"], "find_spec", lambda name: None)
    framework.run(batches(), framework.layer(), progress=True)
    assert capsys.readouterr().err == ""
