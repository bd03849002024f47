"""convert_sub_batchnorm: ghost batch normalization for a model as it is."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from multibn import Group, SingleProcess
from multibn import torch_backend as tb
from multibn.parity.oracle import relative_error
from tests.helpers.ranks import ThreadCommunicator, run_ranks
from tests.torch_backend.convert.test_class_swap import Activated2d
from tests.torch_backend.steps import step

NEEDS = "torch"


def expected(x: Tensor, num_splits: int) -> Tensor:
    """Each part by its own mean and biased variance, from the formula."""
    axis = (0, *range(2, x.ndim))
    parts = []
    for part in x.tensor_split(num_splits):
        mean, var = part.mean(axis, keepdim=True), part.var(axis, correction=0, keepdim=True)
        parts.append((part - mean) / (var + 1e-5).sqrt())
    return torch.cat(parts)


# Shapes, and how many parts four splits make of them.
BATCHES: list[tuple[tuple[int, ...], int]] = [
    ((8, 3), 4), ((11, 3), 4), ((5, 3), 2), ((3, 3), 1), ((2, 3), 1),
    ((6, 3, 5), 4), ((3, 3, 4, 4), 3), ((1, 3, 4, 4), 1),
]  # fmt: skip


@pytest.mark.parametrize("shape, parts", BATCHES, ids=str)
def test_each_part_has_its_own_statistics(shape: tuple[int, ...], parts: int) -> None:
    """The running statistics and evaluation are those of the plain layer."""
    cls = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    plain = cls(3, affine=False, dtype=torch.float64)
    layer: Any = tb.convert_sub_batchnorm(copy.deepcopy(plain), 4)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "xy")
    found, right = (step(f, x, dy, ()) for f in (layer, lambda x: expected(x, parts)))
    plain(x)
    found += [*layer.buffers(), layer.eval()(x)]
    right += [*plain.buffers(), plain.eval()(x)]
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_revert_brings_the_classes_back() -> None:
    model: Any = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3), Activated2d(3))
    before = [(type(layer), set(vars(layer))) for layer in model]
    x = torch.randn(7, 3, 4, 4)
    assert tb.convert_sub_batchnorm(model, 3, strict=True) is model
    assert all(isinstance(layer, tb.SyncBatchNorm) for layer in model)
    assert "num_splits=3" in repr(model[0])
    assert relative_error(model[2](x).detach(), expected(x, 3).relu()) < 1e-5
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model[:2])))
    assert torch.equal(copied(x), model[:2](x))
    assert [(type(layer), set(vars(layer))) for layer in tb.revert_sync_batchnorm(model)] == before


def test_a_converted_layer_is_converted_anew() -> None:
    """None of the four is without effect: splits, other splits, ranks that share, and back."""
    group = Group(None, 1)
    model: Any = tb.convert_sync_batchnorm(
        nn.Sequential(nn.BatchNorm2d(3)), group, nonfinite="skip"
    )
    x, layer = torch.randn(6, 3, 4, 4), model[0]
    for num_splits in (2, 3):
        assert tb.convert_sub_batchnorm(model, num_splits, strict=True)[0] is layer
        assert isinstance(layer.process_group, SingleProcess)
        assert layer.norm_options.num_splits == num_splits
        assert f", num_splits={num_splits})" in repr(layer)
        assert layer.nonfinite == "skip"
        assert relative_error(model(x).detach(), expected(x, num_splits)) < 1e-5
    tb.convert_sync_batchnorm(model, group, strict=True)
    assert layer.process_group is group
    assert relative_error(model(x).detach(), expected(x, 1)) < 1e-5
    assert "num_splits" not in repr(model)


def test_masked_elements_have_no_part() -> None:
    layer: Any = tb.convert_sub_batchnorm(nn.BatchNorm1d(3, affine=False).double(), 2)
    x, mask = torch.randn(5, 3, 6).double(), torch.rand(5, 6) < 0.7
    y = layer(x, mask=mask)
    for part, where, got in zip(x.split(3), mask.split(3), y.split(3), strict=True):
        chosen = part.movedim(1, 2)[where]
        want = F.batch_norm(chosen, None, None, training=True)
        assert relative_error(got.movedim(1, 2)[where], want) < 1e-12


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1)])
def test_a_mask_may_broadcast(shape: tuple[int, ...]) -> None:
    layer: Any = tb.convert_sub_batchnorm(nn.BatchNorm1d(3, affine=False).double(), 3)
    x, mask = torch.randn(6, 3, 6).double(), torch.tensor([1, 0, 1, 1, 0, 1]).bool().view(shape)
    y = layer(x, mask=mask)
    torch.testing.assert_close(y, layer(x, mask=mask.expand(6, 6)))


def test_a_shallow_copy_is_a_layer_of_its_own() -> None:
    layer: Any = tb.convert_sub_batchnorm(nn.BatchNorm1d(3), 2)
    x = torch.randn(4, 3)
    other = copy.copy(layer).eval()
    torch.testing.assert_close(other(x), x / (1 + 1e-5) ** 0.5)
    assert layer.training
    assert not layer.num_batches_tracked


class Tokens(nn.BatchNorm1d):
    """Tokens `(N, L, C)`, as transformers have them, in a list; with a table, and its mean."""

    def forward(self, xs: Any, table: Tensor) -> Any:  # type: ignore[override]
        (x,) = xs
        return (super().forward(x.transpose(1, 2)).transpose(1, 2) @ table.T, table.mean())


@pytest.mark.parametrize("shape, parts", [((6, 5, 3), 3), ((2, 1, 3), 1), ((6, 1, 3), 3)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_class_splits_what_it_normalizes(shape: Any, parts: int, momentum: float | None) -> None:
    """And no other argument, though a table may have as many rows as the batch has samples."""
    layer: Any = tb.convert_sub_batchnorm(Tokens(3, momentum=momentum), 3).double()
    plain = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    for _ in range(2):
        x, table = torch.randn(shape).double(), torch.randn(6, 3).double()
        y, mean = layer([x], table)
        torch.testing.assert_close(y, expected(x.mT, parts).mT @ table.T)
        assert mean == table.mean()
        plain(x.mT)
    torch.testing.assert_close([*layer.buffers()], [*plain.buffers()])


def test_wrong_splits_and_inputs_are_refused() -> None:
    for wrong, kind in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match=f"`num_splits` must be .*got {wrong!r}"):
            tb.convert_sub_batchnorm(nn.BatchNorm1d(3), wrong)  # type: ignore[arg-type]

    layer: Any = tb.convert_sub_batchnorm(nn.BatchNorm2d(3), 2)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.randn(4, 3))
    with pytest.raises(ValueError, match="must have 3 channels in dimension 1"):
        layer(torch.randn(4, 5, 2, 2))
    with pytest.raises(TypeError, match=r"the input must be a torch\.Tensor: got list"):
        layer([torch.ones(4, 3, 2, 2)])
    with pytest.raises(TypeError, match=r"`residual` must be a torch\.Tensor"):
        layer(torch.ones(4, 3, 2, 2), 3.0)
    with pytest.raises(ValueError, match=r"`residual` must have the shape .*\(4, 3, 2, 2\).*: got"):
        layer(torch.ones(4, 3, 2, 2), torch.ones(1, 3, 2, 2))
    for n in (1, 2):
        with pytest.raises(ValueError, match=r"`lengths` must have shape \(4,\)"):
            layer(torch.ones(4, 3, 2, 2), lengths=torch.ones(n, dtype=torch.int64))
    layer(torch.zeros(0, 3, 2, 2))
    assert not layer.num_batches_tracked
    with pytest.raises(ValueError, match="need more than 1 value per channel"):
        tb.convert_sub_batchnorm(nn.BatchNorm1d(3), 2)(torch.randn(1, 3))


def test_vmap_over_inputs_and_over_stacked_models_splits_each_batch() -> None:
    x = torch.randn(3, 8, 2, dtype=torch.float64)
    plain = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False).double())
    y = vmap(tb.convert_sub_batchnorm(plain, 2))(x)
    torch.testing.assert_close(y, torch.stack([expected(each, 2) for each in x]))
    models = [tb.SubBatchNorm1d(2, 2).double() for _ in range(3)]
    state = stack_module_state(models)
    y = vmap(lambda p, b, v: functional_call(models[0], (p, b), (v,)))(*state, x)
    torch.testing.assert_close(y, torch.stack([m(v) for m, v in zip(models, x, strict=True)]))
    torch.testing.assert_close(state[1]["bn.running_mean"][2], models[2].bn.running_mean)


def test_a_part_without_an_element_is_an_error() -> None:
    layer = tb.convert_sub_batchnorm(nn.BatchNorm1d(1), 4)
    lengths = torch.tensor([3, 2, 3, 3, 0, 0, 3, 1])
    with pytest.raises(ValueError, match=r"excludes every .* with an input of shape \(2, 1, 3\)"):
        layer(torch.randn(8, 1, 3), lengths=lengths)
    layer.eval()(torch.randn(8, 1, 3), lengths=lengths)


def test_ranks_that_share_parts_have_equally_many() -> None:
    """Also a rank whose own batch is too small to fill them; the k-th parts share statistics."""
    xs = torch.randn(5, 3, 4).double(), torch.randn(1, 3, 4).double()

    def train(communicator: ThreadCommunicator) -> Tensor:
        layer: Any = tb.convert_sub_batchnorm(nn.BatchNorm1d(3).double(), 2)
        layer.process_group = communicator
        return layer(xs[communicator.rank].requires_grad_()).detach()

    got = run_ranks(2, train)
    norm = nn.BatchNorm1d(3, affine=False).double()
    first, second = norm(torch.cat([xs[0][:3], xs[1]])), norm(xs[0][3:])
    torch.testing.assert_close(got, [torch.cat([first[:3], second]), first[3:]])


def test_another_name_for_the_number_of_parts_is_told_the_right_one() -> None:
    options: Any = {"virtual_batch_size": 128}
    message = r"`virtual_batch_size`\. For a virtual .* num_splits=batch_size"
    with pytest.raises(TypeError, match=message):
        tb.convert_sub_batchnorm(nn.BatchNorm1d(3), 2, **options)
    with pytest.raises(TypeError, match="num_splits"):
        tb.convert_sub_batchnorm(nn.BatchNorm1d(3), **options)
