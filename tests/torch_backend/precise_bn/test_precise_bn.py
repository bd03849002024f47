"""Precise batch norm in one process, and over ranks as threads, against NumPy in float64."""

import contextlib
import copy
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from multibn import torch_backend as tb
from multibn.engine.statistics import OneValueError
from tests.engine.test_population_of_models import Torch
from tests.helpers.ranks import CountingCommunicator, errors_of_rank_0, run_ranks

NEEDS = "torch"

LAYERS: dict[str, Any] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "SyncBatchNorm": tb.SyncBatchNorm,
    "NaiveSyncBatchNorm2d, biased": lambda c: tb.NaiveSyncBatchNorm2d(
        num_features=c, weighting="rank", running_var="biased"
    ),
    "SubBatchNorm2d": lambda c: tb.SubBatchNorm2d(2, c),
    "direct subclass": lambda c: Direct(c),
}


class Direct(_BatchNorm):
    def _check_input_dim(self, input: Any) -> None:
        pass


class Net(nn.Module):
    """Two batch norms in use, one that is not, and random numbers and a buffer of another kind."""

    calls: torch.Tensor

    def __init__(self, batch_norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn1 = batch_norm(3)
        self.bn2 = batch_norm(4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.dropout(self.bn2(self.conv(self.bn1(x)).relu()))


def batches(sizes: Any = (4, 6, 2), seed: int = 0, mean: float = 0.0) -> list[Any]:
    """Batches of unequal sizes, planes, means and scales."""
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(rng.normal(mean + i, 1 + i, (n, 3, 5 + i, 6)).astype("float32"))
        for i, n in enumerate(sizes)
    ]


def rows(xs: list[Any]) -> Any:
    """All elements of all batches, `(C, total)`, float64."""
    return np.concatenate(
        [np.moveaxis(x.double().numpy(), 1, 0).reshape(x.shape[1], -1) for x in xs], axis=1
    )


def inputs_of(model: nn.Module, layer: nn.Module, data: list[Any]) -> list[Any]:
    """What a layer of a copy of `model` is shown."""
    names = {m: name for name, m in model.named_modules()}
    model = copy.deepcopy(model)
    seen: list[Any] = []
    model.get_submodule(names[layer]).register_forward_hook(
        lambda module, args, output: seen.append(args[0].detach())
    )
    with torch.no_grad():
        for x in data:
            model(x)
    return seen


def kept(layer: Any) -> tuple[Any, Any]:
    layer = getattr(layer, "bn", layer)
    return layer.running_mean.double().numpy(), layer.running_var.double().numpy()


def state(model: nn.Module) -> dict[str, Any]:
    return Torch().state(model)


def assert_same(
    after: dict[str, Any], before: dict[str, Any], *, but: tuple[str, ...] = ()
) -> None:
    """`but`: prefixes of the layers whose running mean and variance may differ."""
    moved = [n for n in before if n.startswith(but) and n.endswith(("_mean", "_var"))]
    np.testing.assert_equal(after | dict.fromkeys(moved), before | dict.fromkeys(moved))


def precise(model: nn.Module, data: Any, **options: Any) -> None:
    tb.update_bn_stats(model, data, **{"progress": False, **options})


@pytest.mark.parametrize("kind", LAYERS)
def test_statistics_are_exact(kind: str) -> None:
    """All elements count in float64; fvcore's E[x^2] - E[x]^2 in float32 lacks digits."""
    model = Net(LAYERS[kind])
    data = batches(mean=1e4)
    shown = [inputs_of(model, layer, data) for layer in (model.bn1, model.bn2)]
    before = state(model)
    precise(model, data)
    for layer, xs in zip((model.bn1, model.bn2), shown, strict=True):
        mean, var = kept(layer)
        np.testing.assert_allclose(mean, rows(xs).mean(1), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(var, rows(xs).var(1, ddof=1), rtol=1e-5)
    assert_same(state(model), before, but=("bn1.", "bn2."))
    if kind == "SubBatchNorm2d":  # each split has the whole's, so that aggregation keeps them
        written = kept(copy.deepcopy(model.bn2))
        model.bn2.aggregate_stats()
        np.testing.assert_allclose(kept(model.bn2), written, rtol=1e-6)


def test_an_input_that_is_named_last_is_found() -> None:
    bn = tb.SyncBatchNorm(2)
    x = torch.randn(5, 2)
    mask = torch.tensor([True, True, False, True, True])
    precise(bn, [x], forward_fn=lambda m, x: m(mask=mask, residual=x + 1, input=x))
    np.testing.assert_allclose(kept(bn)[0], rows([x[mask]]).mean(1), rtol=1e-6)


class Doubled(nn.BatchNorm1d):
    def forward(self, x: Any, scale: Any) -> Any:  # type: ignore[override]
        return super().forward(x * scale)


@pytest.mark.parametrize(
    "num_splits, estimator", [*product((0, 1), ("population", "mean_of_var")), (2, "population")]
)
def test_an_own_forward_pass_tells_what_it_normalizes(num_splits: int, estimator: Any) -> None:
    """A layer that nobody has converted (1), too."""
    bn: Any = Doubled(2)
    if num_splits == 0:
        tb.convert_sync_batchnorm(bn)
    elif num_splits > 1:
        tb.convert_sub_batchnorm(bn, num_splits)
    before = type(bn), set(vars(bn))
    xs = [torch.randn(6, 2), 3 + torch.randn(5, 2)]
    precise(bn, xs, estimator=estimator, forward_fn=lambda m, x: m(x, 2))
    parts = [rows([2 * x]) for x in xs] if estimator == "mean_of_var" else [2 * rows(xs)]
    np.testing.assert_allclose(kept(bn)[0], np.mean([x.mean(1) for x in parts], 0), rtol=1e-5)
    var = np.mean([x.var(1, ddof=1) for x in parts], 0)
    np.testing.assert_allclose(kept(bn)[1], var, rtol=1e-5)
    assert num_splits != 1 or (type(bn), set(vars(bn))) == before


def test_a_step_of_step_statistics_and_other_pools_stand_aside() -> None:
    bn = tb.SyncBatchNorm(3, momentum=0.5)
    model: Any = nn.Sequential(bn)
    model.pool = "a model's own"
    data, (x,) = batches(), batches([5], seed=1)
    with tb.step_statistics(model):
        model(x)
        precise(model, data, forward_fn=lambda m, x: m(x if m.pool else None))
        np.testing.assert_allclose(kept(bn)[0], rows(data).mean(1), rtol=1e-5)
    mean = (rows(data).mean(1) + rows([x]).mean(1)) / 2
    np.testing.assert_allclose(kept(bn)[0], mean, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["population", "mean_of_var"])
def test_a_mean_of_variances_has_a_message_in_each_forward_pass(estimator: Any) -> None:
    def messages(communicator: Any) -> list[int]:
        counting = CountingCommunicator(communicator)
        layer = tb.SyncBatchNorm(3, process_group=counting)
        precise(layer, batches(), process_group=counting, estimator=estimator)
        return counting.messages

    for found in run_ranks(2, messages):
        assert found.count(2 * 3 + 4) == 3 * {"population": 1, "mean_of_var": 2}[estimator]
        assert found.count(2 * 3 + 2) == 1  # at the end


def test_random_numbers_of_any_accelerator_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without XPUs has fake tensors and a stand-in of their generator."""
    state = torch.ones(1)
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: state.clone())
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda new, device: state.copy_(new))
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(1, device="xpu:0"))
    with tb.precise_bn._unchanged(model):
        state += 1
    assert state == 1


def test_layers_that_are_frozen_or_untracked_are_left_alone() -> None:
    model: Any = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2).eval(),
        nn.BatchNorm1d(2, track_running_stats=False),
        tb.SyncBatchNorm(2, track_running_stats=False),
        tb.SubBatchNorm1d(5, 2),
    )
    model[4].split_bn.eval()
    data = [torch.randn(5, 2)]
    before = state(model)
    precise(model, data)
    assert_same(state(model), before, but=("0.",))
    assert model[0].running_mean.any()


def test_a_model_without_layers_to_update_is_warned_of() -> None:
    for model in (nn.Linear(2, 2), Net().eval()):
        before = state(model)
        with pytest.warns(UserWarning, match="no batch norm layer in training mode") as caught:
            precise(model, batches())
        assert caught[0].filename == __file__
        assert_same(state(model), before)


def test_a_forward_fn_that_changes_modes_is_undone() -> None:
    model = Net()
    before = state(model)
    precise(model, batches(), forward_fn=lambda m, x: (m.train()(x), m.eval()))
    assert_same(state(model), before, but=("bn1.", "bn2."))


@pytest.mark.parametrize(
    "limits, used, message",
    [
        ({}, 3, None),
        ({"num_iters": 2}, 2, None),
        ({"num_iters": 3}, 3, None),
        ({"num_samples": 1}, 1, None),
        ({"num_samples": 4}, 1, None),
        ({"num_samples": 5}, 2, None),
        ({"num_samples": 12}, 3, None),
        ({"num_samples": 5, "num_iters": 1}, 1, None),
        ({"num_iters": 5}, 3, r"`num_iters` is 5: `data_loader` ended after 3 on rank 0\. All b"),
        ({"num_samples": 99}, 3, r"`num_samples` is 99: `data_loader` ended after 12 on all r"),
    ],
)
def test_limits_hold_and_short_loaders_are_named(limits: Any, used: int, message: Any) -> None:
    data = batches()
    given: list[Any] = []

    def loader() -> Iterator[Any]:
        for x in data:
            given.append(x)
            yield {"label": 3, "image": [x]}

    layer = nn.BatchNorm2d(3)
    # The warning is an error here, which comes when all ranks have finished.
    with pytest.raises(UserWarning, match=message) if message else contextlib.nullcontext():
        precise(layer, loader(), forward_fn=lambda m, b: m(b["image"][0]), **limits)
    assert len(given) == used  # nothing is loaded that is not used
    np.testing.assert_allclose(kept(layer)[0], rows(data[:used]).mean(1), rtol=1e-5)


def test_a_refused_input_is_an_error_on_all_ranks_that_changes_nothing() -> None:
    for estimator in ("population", "mean_of_var"):

        def call(wrong: bool, group: Any, estimator: str = estimator) -> None:
            layer = tb.SyncBatchNorm(3, process_group=group)
            before = state(layer)
            try:
                precise(layer, [torch.ones(2, 3 + wrong)], process_group=group, estimator=estimator)
            finally:
                assert_same(state(layer), before)

        errors_of_rank_0(call, ValueError, "must have 3 channels")
    for x in (torch.ones(2, 4), torch.ones(2, 4, 5)):  # torch's own layer says so itself
        with pytest.raises(RuntimeError, match="should contain 4 elements not 3"):
            precise(nn.BatchNorm1d(3), [x])


def test_empty_batches_count_for_nothing_and_loaders_need_no_length() -> None:
    class Loader(list[Any]):
        def __len__(self) -> int:
            raise NotImplementedError

    data = batches()
    for estimator in ("population", "mean_of_var"):
        layer, alone = tb.SyncBatchNorm(3), tb.SyncBatchNorm(3)
        given = Loader([data[0], data[0][:0], data[1]])
        precise(layer, given, estimator=estimator, progress=True)
        precise(alone, data[:2], estimator=estimator)
        torch.testing.assert_close(layer.state_dict(), alone.state_dict())


class Several(NamedTuple):
    data: Any
    other: Any


@pytest.mark.parametrize(
    "wrap",
    [
        lambda pack: pack.data[:4],
        lambda pack: (pack.data[:4], pack.data),
        lambda pack: [pack.data[:4], 1],
        lambda pack: (pack, pack),
        lambda pack: pack,
        lambda pack: Several(pack.data[:4], pack.data),
    ],
    ids=["tensor", "tuple", "list", "pair of packed", "packed", "named"],
)
def test_the_first_of_several_things_goes_in_and_one_thing_goes_in_whole(wrap: Any) -> None:
    """Four sequences are as many samples of `num_samples`, whatever they are wrapped in."""
    sequences = [torch.randn(n, 2) for n in (5, 3, 9, 4, 7, 2, 6, 8)]
    data = [wrap(nn.utils.rnn.pack_sequence(sequences[k : k + 4], False)) for k in (0, 4)]
    given: list[Any] = []

    class Model(nn.BatchNorm1d):
        def forward(self, x: Any) -> Any:
            given.append(x)
            return super().forward(x if isinstance(x, torch.Tensor) else x.data)

    precise(Model(2), data, num_samples=5)
    whole = [b[0] if type(b) in (tuple, list) else b for b in data]
    assert list(map(id, given)) == list(map(id, whole))


def test_calls_of_other_libraries_and_batches_that_do_not_fit_are_told_the_way() -> None:
    class WithLengths(nn.BatchNorm1d):
        def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
            return super().forward(x)

    x, update = torch.ones(2, 3), cast("Any", tb.update_bn_stats)
    with pytest.raises(TypeError, match=r"`num_samples` needs batches with a tensor.*got list. Pa"):
        precise(nn.BatchNorm2d(3), [[1, "a"]], num_samples=5)
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module: got list\. The order"):
        update([x], nn.BatchNorm1d(3))
    for model, batch, call in (
        (nn.BatchNorm1d(3), {"x": x}, r"`model\(batch\)` failed for a batch of type dict"),
        (tb.SyncBatchNorm(3), {"x": x}, r"`model\(batch\)` failed for a batch of type dict"),
        (WithLengths(3), (x, 2), r"`model\(batch\[0\]\)` failed for .* tuple.*lengths"),
        (nn.BatchNorm1d(3), Several(x, 1), r"`model\(batch\)` failed for a batch of type Several"),
    ):
        with pytest.raises(TypeError, match=call + ".*example `forward_fn=lambda"):
            precise(model, [batch])
    with pytest.raises(TypeError, match=r"missing the required \"forward\" .*example `forward_fn="):
        precise(nn.ModuleList([nn.BatchNorm1d(3)]), [x])  # as a LightningModule without forward
    with pytest.raises(OneValueError, match=r"Use a larger batch, .* with running statistics\.$"):
        precise(tb.SyncBatchNorm(3), [(x[:1], 0)])  # the last batch of a loader
    for layer in (nn.BatchNorm3d(3), tb.SubBatchNorm3d(2, 3)):  # a pathway of a list, without N
        with pytest.raises(ValueError, match=r"of type list: .* for SlowFast's lists of"):
            precise(layer, [[torch.ones(4, 3, 8, 8)]])


def test_padding_that_a_model_could_leave_out_warns() -> None:
    class Padded(tb.SyncBatchNorm):
        def forward(self, x: Any, x_lens: Any = None) -> Any:  # type: ignore[override]
            return super().forward(x, lengths=x_lens)

    batch = [torch.randn(2, 3, 5), torch.tensor([5, 2])]
    with pytest.warns(UserWarning, match="takes x_lens, but only the .* `forward_fn=lambda"):
        precise(Padded(3), [batch])
    precise(Padded(3), batch[:1])
    precise(Padded(3), [batch], forward_fn=lambda model, batch: model(*batch))


@pytest.mark.parametrize("autocast", [False, True])
def test_moments_of_16_bits_are_taken_in_float32(autocast: bool) -> None:
    """They are those of what a layer is shown; buffers keep their dtype."""
    model, data = Net(), batches()
    if not autocast:
        model.bfloat16()
        data = [x.bfloat16() for x in data]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        shown = inputs_of(model, model.bn2, data)
        precise(model, data)
    assert shown[0].dtype == torch.bfloat16
    bound = 1e-5 if autocast else 2**-8
    np.testing.assert_allclose(kept(model.bn2)[0], rows(shown).mean(1), rtol=bound)
    np.testing.assert_allclose(kept(model.bn2)[1], rows(shown).var(1, ddof=1), rtol=bound)
    assert model.bn2.running_var.dtype == (torch.float32 if autocast else torch.bfloat16)


# torch 2.15 asks an activation that a compiled module gets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_models_get_the_statistics_of_plain_ones(inside: bool) -> None:
    """Code that was compiled before would not see the hooks."""
    compiled, plain = Net(), Net()
    model: Any = compiled if inside else torch.compile(compiled, backend="eager")
    if inside:
        compiled.conv.compile(backend="eager")
        compiled.bn2.compile(backend="eager")
    for each in (model, plain):
        each(batches()[0])
        precise(each, batches())
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
