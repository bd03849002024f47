"""Masks and lengths: elements that do not count take no part, whatever they hold."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from multibn import SingleProcess
from multibn import torch_backend as tb
from multibn.engine.masks import WEIGHTINGS
from multibn.parity.oracle import relative_error
from tests.helpers.ranks import ThreadCommunicator, errors_of_rank_0, run_ranks
from tests.torch_backend.steps import step

NEEDS = "torch"

LOCAL = SingleProcess()
C, L = 3, 7
LENGTHS = [[7, 2, 0, 5], [3, 1, 6]]  # of the samples on two ranks


def batch(
    rank: int, padding: float = float("nan"), dtype: Any = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """NormArgs, lengths and mask of a rank."""
    rng = np.random.default_rng(rank)
    lengths = torch.tensor(LENGTHS[rank])
    mask = torch.arange(L) < lengths[:, None]
    x = torch.from_numpy(rng.normal(3, 2, (len(lengths), C, L))).to(dtype)
    return torch.where(mask[:, None], x, padding), lengths, mask


def chosen(x: Tensor, mask: Tensor) -> Tensor:
    """The elements that count, `(elements, C)`."""
    return x.movedim(1, -1)[mask]


def layer_of(communicator: Any = LOCAL, **options: Any) -> tb.SyncBatchNorm:
    layer = tb.SyncBatchNorm(C, process_group=communicator, **options).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -0.5, 1.0]))
        layer.bias.copy_(torch.tensor([0.5, 0.0, -1.0]))
    return layer


def test_compiled_lengths_give_eager_numbers_and_errors() -> None:
    x, lengths, mask = batch(0)
    for layer in (layer_of(), layer_of().eval()):
        compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, lengths=lengths), layer(x, mask=mask))
    with pytest.raises(ValueError, match="got 9 for sample 0"):
        compiled(x, lengths=lengths.clone().fill_(9))


@pytest.mark.parametrize("training", [True, False])
def test_tensors_without_numbers_tell_shapes(training: bool) -> None:
    for context, device in ((FakeTensorMode(), "cpu"), (nullcontext(), "meta")):
        with context, torch.device(device):
            layer = tb.SyncBatchNorm(C).train(training)
            x = torch.zeros(4, C, L)
            assert layer(x, lengths=torch.ones(4).long()).shape == x.shape
            assert layer(x, mask=torch.ones(4, L).bool()).shape == x.shape


def test_the_mask_follows_the_memory_order_of_the_input() -> None:
    """The mask is copied into the order of the input, but in compiled code, which expects one."""
    torch.manual_seed(0)
    x, mask = torch.randn(4, C, 5, 6), torch.rand(4, 5, 6) < 0.5
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    layer = layer_of().float()
    y = layer(turned, mask=mask)
    assert y.stride() == turned.stride()
    torch.testing.assert_close(y, layer_of().float()(x, mask=mask))
    name = layer.layer_communicator.operator_name  # type: ignore[attr-defined]
    made = torch.ops.multibn.mask(turned, mask, None, C, name)
    assert made.is_contiguous()


def test_the_function_takes_masks_and_lengths() -> None:
    x, lengths, mask = batch(0)
    y, statistics = tb.sync_batch_norm(x, process_group=LOCAL, mask=mask)
    expected, plain = tb.sync_batch_norm(chosen(x, mask), process_group=LOCAL)
    assert relative_error(chosen(y, mask), expected) < 1e-11
    assert relative_error(statistics.var, plain.var) < 1e-11
    assert statistics.count == plain.count == sum(LENGTHS[0])
    assert torch.equal(tb.sync_batch_norm(x, process_group=LOCAL, lengths=lengths)[0], y)
    wrong: Any = {"weighting": "batch", "process_group": LOCAL}
    for options in (wrong, wrong | {"mask": mask}):
        with pytest.raises(ValueError, match="`weighting` must be one of 'element', 'sample', 'r"):
            tb.sync_batch_norm(x, **options)


X = torch.zeros(4, C, L, dtype=torch.float64)
WRONG: list[tuple[str, dict[str, Any], Any, str]] = [
    ("both", {"mask": torch.ones(4, L).bool(), "lengths": torch.ones(4).long()}, ValueError,
     "`mask` and `lengths` cannot be passed together: got both"),
    ("shape", {"mask": torch.ones(4, C, L).bool()}, ValueError,
     r"`mask` must have the shape of the input without the channels, \(4, 7\), or one that "
     r"broadcasts to it: got \(4, 3, 7\) for an input of shape \(4, 3, 7\)\. Leave the axis of the "
     r"channels out: mask\[:, 0\]\."),
    ("features", {"mask": torch.ones(4, L, 1).bool()}, ValueError,
     r"got \(4, 7, 1\) .*Leave the axis of the channels out: mask\[\.\.\., 0\]\."),
    ("samples", {"mask": torch.ones(4).bool()}, ValueError,
     r"got \(4,\) .* per-sample mask, add the other axes: mask\[:, None\]\."),
    ("other", {"mask": torch.ones(4, 2, L).bool()}, ValueError, r"\(4, 3, 7\)\.$"),
    ("size", {"mask": torch.ones(3, L).bool()}, ValueError, r"\(4, 7\), .* got \(3, 7\)"),
    ("dtype", {"mask": torch.ones(4, L)}, TypeError, "must have dtype bool.*: got torch.float32. "
     "Convert it: `mask > 0`, or `mask == 0` for an additive mask"),
    ("device", {"mask": torch.ones(4, L, device="meta").bool()}, ValueError,
     "`mask` must be on the device of the input, cpu: got meta"),
    ("type", {"mask": np.ones((4, L), bool)}, TypeError,
     "`mask` must be an array of torch, as the input is: got ndarray"),
    ("list", {"lengths": [1, 2, 3, 4]}, TypeError,
     r"`lengths` must be an array of torch, .*: got list\. Convert it: torch\.asarray\(lengths"),
    ("long", {"lengths": torch.tensor([1, 8, 0, 1])}, ValueError,
     "`lengths` must be from 0 to 7, the length of an input .*: got 8 for sample 1. If an "
     "earlier layer shortened the input"),
    ("negative", {"lengths": torch.tensor([1, 7, -1, 1])}, ValueError, "got -1 for sample 2"),
    ("sparse", {"mask": torch.ones(4, L).bool().to_sparse()}, TypeError,
     r"`mask` must be a dense tensor: got layout torch.sparse_coo. Call to_dense\(\) on it"),
    ("sparse lengths", {"lengths": torch.ones(4).long().to_sparse()}, TypeError,
     "`lengths` must be a dense tensor: got layout torch.sparse_coo"),
    ("number", {"lengths": torch.ones(3).long()}, ValueError, r"shape \(4,\), .* got \(3,\)"),
    ("real", {"lengths": torch.ones(4)}, TypeError,
     "must be integers: got dtype torch.float32. For relative lengths, pass round"),
]  # fmt: skip


def test_the_error_for_a_list_names_the_library_of_a_subclass() -> None:
    """torchvision's images, for example, are tensors, but torchvision has no `asarray`."""
    image: Any = type("Image", (torch.Tensor,), {"__module__": "vision"})
    x = torch.ones(4, 3, L).as_subclass(image)
    with pytest.raises(TypeError, match=r"Convert it: torch\.asarray\(mask\)\."):
        layer_of()(x, mask=[True] * L)


@pytest.mark.parametrize("name, options, error, message", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_masks_are_errors_on_all(name: str, options: Any, error: Any, message: str) -> None:
    right = {"mask": torch.ones(4, L).bool()}
    errors_of_rank_0(
        lambda wrong, group: layer_of(group)(X, **(options if wrong else right)), error, message
    )


def test_an_input_with_channels_last_is_told_of_the_transpose() -> None:
    """Where lengths or mask do not give the mistake away, the number of channels does."""
    layer, x = layer_of(), X.movedim(1, -1)
    with pytest.raises(ValueError, match=r"got 7 in shape .*pass x\.movedim\(-1, 1\)"):
        layer(x, lengths=torch.full((4,), 2))
    with pytest.raises(ValueError, match=r"got 7 for sample 0. The input looks like \(N, L, C\)"):
        layer(x, lengths=torch.full((4,), L))
    with pytest.raises(ValueError, match=r"got \(4, 7\) .* The input looks channels-last"):
        layer(x, mask=torch.ones(4, L).bool())
    with pytest.raises(ValueError, match=r"got 8 in shape \(4, 8, 7\)\.$"):
        layer(torch.zeros(4, 8, L))


@pytest.mark.parametrize("tracks", [True, False])
def test_a_reverted_layer_takes_masks(tracks: bool) -> None:
    """The numbers are those of the layer that it was, which shared with nobody."""
    layers = [layer_of(track_running_stats=tracks) for _ in "ab"]
    layers[1] = tb.revert_sync_batchnorm(layers[1])
    x, lengths, mask = batch(0)
    ones = torch.ones_like(x)
    for options, training in product(({"lengths": lengths}, {"mask": mask}), (True, False)):
        results = [
            step(partial(layer.train(training), **options), x, ones, layer.parameters())
            for layer in layers
        ]
        torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(*(layer.state_dict() for layer in layers), rtol=0, atol=0)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_mask_that_leaves_nothing_is_an_error_on_every_rank(weighting: Any) -> None:
    """But an empty batch is none, if all ranks have one."""

    def train(communicator: ThreadCommunicator) -> None:
        layer, rank = layer_of(communicator, weighting=weighting), communicator.rank
        for num_samples in ((0, 0), (0, 4), (4, 0), (4, 4)):
            n = num_samples[rank]
            message = (
                r"`mask` or `lengths` excludes every element of the batch on all 2 rank"
                r"\(s\) in SyncBatchNorm, with an input of shape "
                rf"\({n}, 3, 7\) on rank {rank}\. Keep at least one element"
            )
            with pytest.raises(ValueError, match=message) if any(num_samples) else nullcontext():
                layer(
                    X[:n].clone().requires_grad_(), lengths=torch.zeros(n).long()
                ).sum().backward()
        assert not layer.num_batches_tracked
        assert torch.equal(layer.running_var, torch.ones(C).double())  # type: ignore[arg-type]

    run_ranks(2, train)


def test_no_part_moves_if_a_mask_leaves_nothing_of_another() -> None:
    parts: Any = tb.convert_sub_batchnorm(tb.SyncBatchNorm(3), 2)
    second = (torch.arange(4) > 1)[:, None].expand(4, L)
    with pytest.raises(ValueError, match="excludes every element of the batch"):
        parts(X, mask=second)
    assert parts.num_batches_tracked == 0
    assert not parts.running_mean.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint64])
def test_lengths_may_be_any_integers(dtype: torch.dtype) -> None:
    """torch compares no numbers of uint16 and uint64."""
    x, lengths, mask = batch(0)
    assert torch.equal(layer_of()(x, lengths=lengths.to(dtype)), layer_of()(x, mask=mask))


def test_evaluation_checks_masks_too() -> None:
    with pytest.raises(TypeError, match="must have dtype bool"):
        layer_of().eval()(X, mask=torch.ones(4, L))
    with pytest.raises(ValueError, match=r"`lengths` needs an input of shape \(N, C, L\)"):
        layer_of().eval()(X[:, :, 0], lengths=torch.ones(4).long())
