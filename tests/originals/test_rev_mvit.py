"""SlowFast's reversible MViT where it stood: its training order, evaluation, traces and counts.

SlowFast cannot be installed. `tests/torch_backend/reversible/mvit/reference.py` has the numbers of
its own code at commit 287ec007, unmodified; the calls are those of its tools/train_net.py and
slowfast/utils/misc.py.
"""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from multibn.torch_backend.reversible import RevMViT
from tests.helpers.fvcore import activation_count, flop_count
from tests.torch_backend.reversible.mvit import reference
from tests.torch_backend.reversible.mvit.reference import EVALUATION, reference_model

NEEDS = "torch dev"

LABELS = torch.tensor([3, 7])


def batch(name: str) -> Tensor:
    return reference.reference_input(reference.reference_case(name)["MVIT"]["PATCH_2D"])


def model_stats(model: nn.Module, inputs: Any) -> tuple[float, float]:
    """Giga multiply-adds and mega activations, as misc.py:133 get_model_stats counts."""
    training = model.training
    model.eval()
    counts = [sum(count(model, inputs)[0].values()) for count in (flop_count, activation_count)]
    model.train(training)
    return counts[0], counts[1]


def make_optimizer(model: RevMViT) -> torch.optim.Optimizer:
    """Groups of parameters as in slowfast/models/optimizer.py:32, with ZERO_WD_1D_PARAM."""
    skip = model.no_weight_decay()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            apart = any(k in name for k in skip) or p.ndim == 1 or name.endswith(".bias")
            (others if apart else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-8)


def train(model: RevMViT, optimizer: torch.optim.Optimizer, x: Tensor) -> list[float]:
    """Losses of three steps in the order of train_net.py:42 train_epoch."""
    model.train()
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model([x * (1 + step)]), LABELS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_near(found: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_summary(found: Tensor, expected: dict[str, Any]) -> None:
    assert_near(found.norm(), expected["norm"])
    assert_near(found.flatten()[:4], expected["head"], 1e-9 * expected["norm"])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["rev_vit_meanpool_avgfuse", "rev_mvit_video", "rev_mvit_relpos", "rev_mvit_sines"]
)
def test_counts_training_files_and_traces_are_the_originals(name: str) -> None:
    expected, x = EVALUATION[name], batch(name).detach()
    model = reference_model(name, zero_decay_pos_cls=True)
    gflops, mactivations = model_stats(model, ([x],))  # train_net.py:523 logs the model's size
    assert gflops == pytest.approx(expected["gflops"], rel=1e-12)
    assert mactivations == pytest.approx(expected["mactivations"], rel=1e-12)
    assert model.training

    optimizer = make_optimizer(model)
    groups = [[len(g["params"]), g["weight_decay"]] for g in optimizer.param_groups]
    assert groups == expected["training"]["groups"]
    assert train(model, optimizer, x) == pytest.approx(expected["training"]["losses"], rel=1e-9)

    file = io.BytesIO()
    torch.save({"epoch": 0, "model_state": model.state_dict()}, file)  # checkpoint.py:118
    file.seek(0)
    resumed = reference_model(name)
    resumed.load_state_dict(torch.load(file)["model_state"])
    with torch.no_grad():
        y = resumed.eval()([x])
    assert_near(y, expected["training"]["probabilities"])

    traced = torch.jit.trace(resumed, ([x],), check_trace=False)
    torch.testing.assert_close(traced([x]), y)
    torch.testing.assert_close(traced([x[:1]]), y[:1])  # another batch size


@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_is_the_originals_to_second_order(name: str) -> None:
    """A saliency map, and the gradients of a penalty on it."""
    expected, x = EVALUATION[name], batch(name)
    model = reference_model(name).eval()
    y = model([x])
    assert_near(y.detach(), expected["probabilities"])
    (saliency,) = torch.autograd.grad(reference.reference_loss(y), x, create_graph=True)
    assert_summary(saliency.detach(), expected["saliency"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    of_x, *others = torch.autograd.grad(
        saliency.square().sum(), [x, *parameters], allow_unused=True
    )
    assert_summary(of_x, expected["penalty"]["input"])
    squares = [g.square().sum() for g in others if g is not None]
    assert_near(torch.stack(squares).sum().sqrt(), expected["penalty"]["norm"])


def test_sines_are_fixed() -> None:
    """The other tests of this file hold the numbers, with the sines added twice."""
    positions = RevMViT.from_config(reference.reference_case("rev_mvit_sines")).pos_embed
    assert_near(positions[0, 13].double(), EVALUATION["rev_mvit_sines"]["pos_embed"], 1e-6)
    assert not positions.requires_grad


@pytest.mark.parametrize("training", [False, True])
def test_torchs_flop_counter_counts_the_recomputation(training: bool) -> None:
    """Twice the multiply-adds of convolutions and matrix products, the backward pass after them."""
    totals = []
    for no_custom_backward in (False, True):
        model = reference_model("rev_vit").train(training)
        model.rev_backbone.no_custom_backward = no_custom_backward
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            y = model(batch("rev_vit"))
            forward = counter.get_total_flops()
            y.sum().backward()
        assert forward == 2 * (294_912 + 3_540_864 + 196_608)  # fvcore's of the original
        totals.append(counter.get_total_flops())
    assert (totals[0] > totals[1]) == training  # F and G run again


def test_no_custom_backward_is_ordinary_autograd() -> None:
    """The original's switch for debugging: ordinary autograd, which also has second order."""
    model, x = reference_model("rev_mvit"), batch("rev_mvit")
    assert model.rev_backbone.no_custom_backward is False
    parameters = list(model.parameters())
    gradients: list[tuple[Tensor, ...]] = []
    with sdpa_kernel(SDPBackend.MATH):  # torch has no second order of its fused kernels
        for switch in (False, True):
            model.rev_backbone.no_custom_backward = switch
            assert model.rev_backbone.no_custom_backward is switch
            loss = reference.reference_loss(model([x]))
            gradients.append(torch.autograd.grad(loss, parameters, create_graph=switch))
    norm = float(torch.cat([g.flatten() for g in gradients[0]]).norm())
    for reversible, stored in zip(*gradients, strict=True):
        torch.testing.assert_close(reversible, stored.detach(), rtol=0, atol=1e-12 * norm)
    penalty = torch.stack([g.square().sum() for g in gradients[1]]).sum()
    assert torch.autograd.grad(penalty, parameters[0])[0].norm() > 0
