"""Tools that describe or translate a model, on plain and converted models."""

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnxruntime
import torch
import torchinfo
from fvcore.nn import FlopCountAnalysis
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from tests.programs.classes import Found, images, kinds, resnet


def summary(model: nn.Module) -> Found:
    """The lines of summaries, with and without data."""
    lines = []
    for device in ("cpu", "meta"):
        part = copy.deepcopy(model).to(device)
        for mode in ("train", "eval"):
            result = torchinfo.summary(
                *(part, (4, 3, 64, 64)), dtypes=[torch.float64], device=device, mode=mode, verbose=0
            )
            lines += [
                f"{device} {mode} {line.var_name}: {line.output_size}, {line.num_params}"
                for line in result.summary_list
            ]
            lines.append(f"{result.total_mult_adds} {result.total_output_bytes}")
    return lines, []


def exporting(model: nn.Module) -> Found:
    """The operators that torch's two exporters write, and what they compute."""
    model, x = model.eval().float(), images().float()
    operators, outputs = [], []
    for dynamo in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "model.onnx")
            with contextlib.redirect_stdout(io.StringIO()):  # the progress
                torch.onnx.export(model, (x,), path, dynamo=dynamo, input_names=["x"])
            operators += [node.op_type for node in onnx.load(path).graph.node]
            run = onnxruntime.InferenceSession(path)
            outputs += [torch.from_numpy(y) for y in run.run(None, {"x": x.numpy()})]
    return operators, outputs


def int8(model: nn.Module) -> Found:
    """Weights in 8 bits, then inputs too: the parts, and the outputs."""
    outputs = []
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        part = copy.deepcopy(model).eval().float()
        quantize_(part, config)
        outputs.append(part(images().float()))
    return kinds(part), outputs


def flops(model: nn.Module) -> Found:
    """Operations of each kind in evaluation."""
    counts = FlopCountAnalysis(model.eval(), images()).unsupported_ops_warnings(False)
    return [f"{name}: {count}" for name, count in counts.by_operator().items()], []


TOOLS: Sequence[tuple[str, str, Callable[[nn.Module], Found], Callable[[], nn.Module]]] = (
    ("torchinfo", "summary, resnet18, on CPU and on meta: lines", summary, resnet),
    ("onnxruntime", "torch.onnx.export, both exporters, resnet18: operators", exporting, resnet),
    ("torchao", "quantize_ to int8, resnet18: parts afterwards", int8, resnet),
    ("fvcore", "FlopCountAnalysis, resnet18: kinds of operators", flops, resnet),
)
