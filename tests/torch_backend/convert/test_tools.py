"""Tools that trace, measure and export models, on converted models."""

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

from multibn import SingleProcess
from multibn.torch_backend import (
    NaiveSyncBatchNorm2d,
    SubBatchNorm2d,
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from tests.helpers.ranks import CountingCommunicator
from tests.torch_backend.convert.test_class_swap import Activated2d
from tests.torch_backend.steps import step

NEEDS = "torch"

with warnings.catch_warnings():  # it scripts methods when it is imported
    warnings.filterwarnings("ignore", "`torch.jit.script_method", DeprecationWarning)
    from torch.fx.experimental.optimization import fuse, optimize_for_inference


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), Activated2d(4))


def model() -> Any:
    return convert_sync_batchnorm(nn.Sequential(plain(), NaiveSyncBatchNorm2d(num_features=4)))


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = SyncBatchNorm(3, fuse_relu=True)
        self.register_buffer("lengths", torch.tensor([4, 2]))

    def forward(self, x: Any) -> Any:
        return self.norm(x, residual=2 * x, lengths=self.lengths)


def splits() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), SubBatchNorm2d(2, 4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", [model, Residual, splits])
def test_a_traced_model_is_the_model(build: Callable[[], Any], training: bool) -> None:
    """Each layer is a node, as a layer of torch's is, so the trace trains as the model does."""
    net = build().train(training)
    traced = fx.symbolic_trace(copy.deepcopy(net))
    layers = [path for path, part in net.named_modules() if hasattr(part, "weighting")]
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert [path for path in calls if path in layers] == layers
    for mode in (training, not training):
        torch.testing.assert_close(traced.train(mode)(X), net.train(mode)(X))
    torch.testing.assert_close(traced.state_dict(), net.state_dict())


def test_fusion_leaves_the_layers() -> None:
    net = model().eval()
    torch.testing.assert_close(fuse(net)(X), net(X))
    torch.testing.assert_close(optimize_for_inference(net)(X), net(X))


def test_a_converted_model_can_be_fused_by_hand() -> None:
    """`fuse_modules` knows torch's own classes only, so that a model is reverted before."""
    net: Any = convert_sync_batchnorm(plain())
    net(X)
    fused = fuse_conv_bn_eval(net.eval()[0], net[1])
    torch.testing.assert_close(fused(X), net[:2](X))
    with pytest.raises(AssertionError, match=r"find fuser method for.*SyncBatchNorm2d"):
        quantization.fuse_modules(net, [["0", "1", "2"]])
    fused = quantization.fuse_modules(revert_sync_batchnorm(copy.deepcopy(net)), [["0", "1", "2"]])
    torch.testing.assert_close(fused(X), net(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.parametrize("training", [True, False])
def test_quantization_leaves_the_layers(training: bool) -> None:
    net = model().train(training)
    if training:
        mapping = quantization.get_default_qat_qconfig_mapping("x86")
        prepared = quantize_fx.prepare_qat_fx(copy.deepcopy(net), mapping, (X,))
    else:
        mapping = quantization.get_default_qconfig_mapping("x86")
        prepared = quantize_fx.prepare_fx(copy.deepcopy(net), mapping, (X,))
    prepared(X)
    assert sum(isinstance(part, SyncBatchNorm) for part in prepared.modules()) == 3
    torch.testing.assert_close(prepared(X), net(X), atol=0.1, rtol=0)  # 8 bits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_shapes_are_known_without_data(mode: Callable[[], Any], training: bool) -> None:
    """No communication: the shapes of other ranks do not matter."""
    counting = CountingCommunicator(SingleProcess())
    with mode():
        net: Any = convert_sync_batchnorm(plain(), counting).train(training)
        x = torch.empty(2, 3, 4, 4, requires_grad=True)
        y = net(x)
        y.sum().backward()
    assert y.shape == (2, 4, 4, 4)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert y.device == x.device
    assert net[1].weight.grad.shape == (4,)
    assert counting.messages == counting.first_messages == []


def test_bad_input_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="must have 3 channels in dimension 1"):
        SyncBatchNorm(3, device="meta")(torch.empty(2, 4, device="meta"))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_operations_are_counted_without_data(momentum: float | None) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 1), SyncBatchNorm(4, momentum=momentum))
        with FlopCounterMode(display=False) as flops:
            net(torch.empty(2, 3, 4, 4)).sum().backward()
    assert flops.get_total_flops() == 2 * 2 * (2 * 4 * 4) * 3 * 4


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
def test_a_reverted_model_can_be_scripted(training: bool) -> None:
    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3))).train(training)
    scripted = torch.jit.script(revert_sync_batchnorm(copy.deepcopy(net)))
    torch.testing.assert_close(scripted(X), net(X))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_trace_in_evaluation_gives_the_same_numbers(tmp_path: Path) -> None:
    net = model()
    net(X)
    traced = torch.jit.trace(net.eval(), (X,))
    torch.jit.save(traced, tmp_path / "traced.pt")
    loaded = torch.jit.load(tmp_path / "traced.pt")
    for same in (traced, loaded, torch.jit.freeze(loaded)):
        torch.testing.assert_close(same(2 * X), net(2 * X))


# The second is of F.batch_norm itself.
@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore:Converting a tensor to a Python")
def test_programs_can_hold_layers_without_running_statistics_in_evaluation() -> None:
    net = convert_sync_batchnorm(nn.BatchNorm2d(3, track_running_stats=False)).eval()
    exported = torch.export.export(net, (X,)).module()
    for same in (exported, torch.jit.trace(net, (X,))):
        torch.testing.assert_close(same(2 * X), net(2 * X))


def test_make_fx_gives_a_program_of_the_same_numbers() -> None:
    """The program moves the model's buffers, as that of torch's own layers does."""
    plain = nn.Sequential(nn.BatchNorm2d(3)).double()
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    for x in (X.double(), 2 * X.double()):
        programs = [make_fx(model)(X.double()) for model in (plain, net)]
        torch.testing.assert_close(*(program(x) for program in programs))
        torch.testing.assert_close(*([*model.buffers()] for model in (plain, net)))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_trace_in_training_names_the_cure() -> None:
    """fvcore's FlopCountAnalysis and torch.onnx.export(dynamo=False) trace, too."""
    net = model()
    with pytest.raises(RuntimeError, match=r"cannot trace layers that .* model.eval\(\) first, or"):
        torch.jit.trace(net, (X,))
    net(X)  # not in a tracing state for ever


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method", "ignore:.torch.jit.save")
def test_mkldnn_evaluates_converted_models() -> None:
    """torch replaces nn.BatchNorm2d, converted or not."""
    from torch.utils.mkldnn import to_mkldnn  # scripts methods

    net = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    net(X)
    y = to_mkldnn(copy.deepcopy(net.eval()))(X.to_mkldnn())
    assert y.is_mkldnn
    torch.testing.assert_close(y.to_dense(), net(X))


# torch 2.11 reads a saved program into memory that it may not write to.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("strict", [True, False])
def test_export_in_training_names_the_cure(strict: bool) -> None:
    message = r"cannot export layers that share(.|\n)*model.eval\(\) first"
    with pytest.raises(Exception, match=message):
        torch.export.export(model(), (X,), strict=strict)
    net = model().eval()
    sizes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(net, (X,), strict=strict, dynamic_shapes=sizes)
    more = torch.cat((X, 2 * X))
    torch.testing.assert_close(program.module()(more), net(more))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(more), net(more))


def parametrized(net: Any) -> Any:
    parametrize.register_parametrization(net[1], "weight", nn.Softplus())
    parametrizations.weight_norm(net[0])
    return net


def pruned(net: Any) -> Any:
    prune.random_unstructured(net[1], "weight", 2)
    prune.l1_unstructured(net[0], "weight", 3)
    return net


def without_data_and_assigned(net: Any) -> Any:
    filled = copy.deepcopy(net).to("meta")
    filled.load_state_dict(net.state_dict(), assign=True)
    return filled


def without_data_and_filled(net: Any) -> Any:
    filled = copy.deepcopy(net).to("meta").to_empty(device="cpu")
    filled.load_state_dict(net.state_dict())
    return filled


@pytest.mark.parametrize(
    "change", [parametrized, pruned, without_data_and_assigned, without_data_and_filled]
)
@pytest.mark.parametrize("training", [True, False])
def test_tools_change_a_converted_model_like_a_plain_one(change: Any, training: bool) -> None:
    results = []
    for net in (plain().double(), convert_sync_batchnorm(plain().double())):
        torch.manual_seed(0)
        changed = change(net.train(training))
        results.append(step(changed, X.double(), torch.linspace(-1, 1, 128).view(2, 4, 4, 4)))
    torch.testing.assert_close(*results)
