"""One update of the running statistics for all forward passes of a step."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F

from multibn import torch_backend as tb
from tests.helpers.ranks import ThreadCommunicator, run_ranks
from tests.torch_backend.steps import checkpointed

NEEDS = "torch"


def data(sizes: Sequence[tuple[int, int]], rank: int) -> list[torch.Tensor]:
    rng = np.random.default_rng([len(sizes), rank])
    return [torch.from_numpy(rng.normal(3, 2, (n[rank], 4, 3))) for n in sizes]


def pair() -> list[Any]:
    return [tb.SyncBatchNorm(4).double() for _ in "ab"]


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Samples of each micro-batch on ranks 0 and 1. Weightings other than by elements count batches by
# their elements, so that a step equals one batch only if all ranks divide theirs alike.
UNEVEN, ALIKE = [(2, 2), (1, 1), (5, 2), (0, 3), (3, 1)], [(2, 6), (1, 3)]


@pytest.mark.parametrize(
    "option, value, sizes",
    [("momentum", 0.3, UNEVEN), ("momentum", None, UNEVEN), ("running_var", "biased", UNEVEN),
     ("running_var", "unbiased_local", UNEVEN), ("weighting", "rank", ALIKE)],
)  # fmt: skip
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_equals_one_batch(option: str, value: Any, sizes: Any, recomputes: bool) -> None:
    """A rank's own elements are those of all its micro-batches."""

    def train(communicator: ThreadCommunicator, micro: bool) -> list[torch.Tensor]:
        layer = tb.SyncBatchNorm(4, process_group=communicator, **{option: value}).double()
        run: Any = partial(checkpointed, layer) if recomputes and micro else layer
        for _ in range(2):
            xs = data(sizes, communicator.rank)
            with tb.step_statistics(layer):
                for x in xs if micro else [torch.cat(xs)]:
                    run(x.requires_grad_()).square().sum().backward()
        return [*layer.buffers()][: 1 if option == "weighting" else 3]

    found, expected = (run_ranks(2, partial(train, micro=micro)) for micro in (True, False))
    assert_equal(found, expected)


class OfOwnFactor(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(input, mean, var, self.weight, self.bias, self.training, 0.7, self.eps)


def test_a_layer_may_have_a_momentum_of_its_own() -> None:
    whole, *layers = (tb.convert_sync_batchnorm(OfOwnFactor(4).double()) for _ in "abc")
    xs = data([(4, 0), (2, 0)], 0)
    whole(torch.cat(xs))
    calls: Any = layers[0], torch.compile(layers[1], backend="aot_eager")
    for layer, call in zip(layers, calls, strict=True):
        with tb.step_statistics(layer):
            for x in xs:
                call(x)
        assert_equal([*layer.buffers()][:2], [*whole.buffers()][:2])


def test_a_step_moves_buffers_that_were_replaced_inside_of_it() -> None:
    layer, expected = pair()
    (x,) = data([(6, 0)], 0)
    layer.float()
    with tb.step_statistics(layer):
        layer(x.float())
        layer.double()
        layer.momentum = 0.5
    expected.momentum = 0.5
    expected(x)
    assert_equal(layer.state_dict(), expected.state_dict(), 1e-6)


def test_evaluation_during_a_step_adds_nothing() -> None:
    layer, expected = pair()
    (x, z) = data([(6, 0), (3, 0)], 0)
    before = layer.eval()(z)
    with tb.step_statistics(layer):
        layer.train()(x)
        assert torch.equal(layer.eval()(z), before)
    expected(x)
    assert_equal(layer.state_dict(), expected.state_dict())


def test_nothing_changes_without_a_batch_or_after_an_exception() -> None:
    layer, _ = pair()
    (x,) = data([(6, 0)], 0)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    with tb.step_statistics(layer):
        layer(x[:0])
    with pytest.raises(ValueError, match="must have 4 channels"), tb.step_statistics(layer):
        layer(layer(x)[:, :3])
    with tb.step_statistics(layer):
        pass
    assert_equal(layer.state_dict(), before, 0)
    layer(x)  # the step is over
    assert layer.num_batches_tracked == 2


def test_a_step_inside_of_a_step_belongs_to_the_outer_one() -> None:
    layer, expected = pair()
    xs = data([(6, 0), (3, 0), (2, 0)], 0)
    with tb.step_statistics(layer):
        layer(xs[0])
        with tb.step_statistics(nn.Sequential(layer)):
            layer(xs[1])
        assert layer.num_batches_tracked == 0
        layer(xs[2])
    expected(torch.cat(xs))
    assert_equal(layer.state_dict(), expected.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo itself
def test_a_model_is_compiled_again_for_steps_once_only() -> None:
    model = nn.Sequential(tb.SyncBatchNorm(4, momentum=None), tb.SubBatchNorm1d(2, 4)).double()
    eager = copy.deepcopy(model)
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return lookup_backend("aot_eager")(module, inputs)

    compiled: Any = torch.compile(model, backend=count, fullgraph=True)
    xs = data([(6, 0)] * 3, 0)
    for each in (compiled, eager):
        each(xs[0])
        compiled_after = []
        for _ in range(2):
            with tb.step_statistics(each):
                for x in xs:
                    each(x).square().sum().backward()
            compiled_after.append(len(graphs))
        each(xs[1])
        assert compiled_after == [len(graphs)] * 2
    assert_equal(model.state_dict(), eager.state_dict())
    assert model[0].num_batches_tracked == 4


def test_a_model_without_layers_of_this_package_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"must have a layer of multibn\.torch: got none in"),
        tb.step_statistics(nn.BatchNorm1d(4)),
    ):
        pass
