"""The Triton kernels, on a GPU and on the host through Triton's interpreter.

Triton reads at its import whether to interpret, so each runs in a process of its own.
"""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource

from multibn import SingleProcess, kernels
from multibn.engine.plan import NormArgs, Plan
from multibn.kernels.triton import passes, steps, tiling
from multibn.torch_backend.layer import autograd
from tests.helpers import launch, require
from tests.helpers.spread import spread
from tests.kernels.passes import takes_int_of_an_array

NEEDS = "torch triton"

HERE = Path(__file__).parent
NAMES = "triton_passes triton_steps triton_prepared test_passes test_moments test_steps"
CHECKS = [str(HERE / f"{name}.py") for name in NAMES.split()]


def _run_checks(*, interpreted: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS]
    variables = os.environ | {"TRITON_INTERPRET": str(int(interpreted)), "OMP_NUM_THREADS": "1"}
    return launch.captured(*command, timeout=900, env=variables)


@pytest.mark.skipif(
    takes_int_of_an_array(),
    reason="Triton's interpreter takes int() of an array, which NumPy 2.5 refuses",
)
@pytest.mark.timeout(1000)
@pytest.mark.beside(partial(_run_checks, interpreted=True), "torch", "triton")
def test_the_checks_pass_in_the_interpreter(beside: subprocess.CompletedProcess[str]) -> None:
    assert beside.returncode == 0, beside.stdout + beside.stderr
    assert " passed" in beside.stdout


def test_the_checks_pass_on_a_gpu() -> None:
    require.need("gpu")
    run = _run_checks(interpreted=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


PASSES = ["moments", "normalize", "backward_sums", "input_gradient"]


@pytest.mark.parametrize(
    "columns, kernel, with_all", spread([0, 1, 2], PASSES, over=[[True, False]])
)
def test_the_passes_compile_for_a_gpu(
    columns: int, kernel: str, with_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is stricter than the interpreter, and needs no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants: dict[str, Any] = {"ROWS": 16, "COLS": 128, "COLUMNS": columns, "VECTOR": 8}
    constants |= {"DTYPE": triton.language.float32, "RELU": True}
    types: dict[str, Any] = dict.fromkeys(("x", "y", "dy", "dx", "residual"), "*bf16")
    types |= dict.fromkeys(("coefficients", "partials"), "*fp32")
    types |= dict.fromkeys(("summed", "statistics"), "*fp64")
    types |= dict.fromkeys(passes._SIZES, "i64") | {"inner": "i32"}
    if not with_all:  # neither residual nor mask
        constants |= {"residual": None, "dresidual": None, "mask": None}
        constants |= {"coefficients": None} if kernel == "backward_sums" else {}
    if kernel in ("backward_sums", "input_gradient") and not with_all:
        constants["y"] = None
    types |= {"dresidual": "*bf16", "mask": "*u8"}
    asm = compile_for_a_gpu(getattr(passes, kernel), types, constants, fused=True)
    offsets = re.findall(r"tt\.addptr .*, (?:tensor<\S*x)?(i\d+)>? loc", asm["ttir"])
    assert set(offsets) == {"i64"}, "there may be more than 2**31 elements"
    ptx = asm["ptx"]
    assert not re.search(r"\b(add|sub|mul|div|fma|sqrt)\S*f64", ptx)
    # 16 bytes of an activation at a time, of planes of any size.
    assert ".v4.b32" in ptx
    assert not re.search(r"\b(ld|st)\.global\S*16\b", ptx)
    # What a channel's coefficients need is divided in the steps; a tile's mean, here.
    divides = re.search(r"\b(div|sqrt|rsqrt|rcp)\S*f32", ptx) is not None
    assert divides is (kernel == "moments")
    if (kernel, with_all, columns) == ("moments", True, 0):  # with too few registers it spills
        compile_for_a_gpu(getattr(passes, kernel), types, constants, fused=True, maxnreg=24)


@pytest.mark.parametrize("parameter", ["fp16", "bf16", "fp32", "fp64", None])
def test_the_steps_compile_for_a_gpu(
    parameter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parameter` is the dtype of parameters and running statistics."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = ["summed", "numbers", "statistics", "checked", "found"]
    parameters = ("weight", "bias", "dweight", "dbias", "running_mean", "running_var")
    types = dict.fromkeys(("start", "length", "splits", "C"), "i32")
    types |= dict.fromkeys(wide, "*fp64") | dict.fromkeys(("partials", "coefficients"), "*fp32")
    types |= dict.fromkeys(parameters, f"*{parameter}") | {"num_batches": "*i64"}
    # Numbers are passed as their bits; rank_weight and count may come from a mask.
    types |= dict.fromkeys(("rank_weight", "count"), "*fp64" if parameter else "i64")
    types |= {"factor": "*fp64"} if parameter == "fp16" else {}
    optional: dict[str, Any] = {} if parameter else dict.fromkeys((*parameters, "num_batches"))
    step: dict[str, Any] = {"BLOCK": 256}
    merge = {"BLOCK": 32, "SPLITS": 8}
    moved = step | {"CUMULATIVE": parameter == "fp32", "UNBIASED": parameter != "fp16"}
    for name, constants in (
        ("merge_moments", merge),
        ("merge_sums", merge | optional),
        ("finish_forward", moved | optional),
        ("gradient_coefficients", step | optional),
        ("nonfinite_flags", {"SHARE": 8192}),
        ("coefficients_of", step | optional),
    ):
        compiled = compile_for_a_gpu(getattr(steps, name), types, constants, fused=False)
        # Arithmetic is float64, and each operation is rounded.
        assert "f64" in compiled["ptx"]
        assert not re.search(r"\bfma|\b(add|sub|mul|div|sqrt)\S*f32", compiled["ptx"])


@pytest.mark.parametrize(
    "gpu", [None, SimpleNamespace(backend="cuda", arch=61)], ids=["no compiler", "old"]
)
def test_a_gpu_that_triton_cannot_use_takes_torchs_operations(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes its launcher by a C compiler: torch's operations compute without one."""

    def target() -> Any:
        if gpu is None:
            raise RuntimeError("Failed to find C compiler.")
        return gpu

    importlib.import_module("multibn.kernels.triton.launch")  # while torch has no GPU
    driver = SimpleNamespace(get_current_target=target)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "multibn.kernels.cuda", raising=False)
    why = "the GPU has compute capability 6.1, below 7.0" if gpu else "Failed to find C compiler"
    expected = rf"Triton is not usable here .{re.escape(why)}\.., .* gcc and python3-dev"
    with pytest.warns(RuntimeWarning, match=expected):
        assert kernels._native.__wrapped__("cuda") is kernels.reference


def test_a_layout_that_the_kernels_refuse_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is saved for the backward pass, too."""
    taken: list[Any] = []

    def forward(plan: Plan, i: Any) -> Any:
        taken.append(i.x)
        return torch.empty_like(i.x), None

    monkeypatch.setattr(Plan, "forward", forward)
    monkeypatch.setattr(autograd, "without_autocast", lambda x: contextlib.nullcontext())
    whole = torch.empty(4, 8, 6, 6, device="meta", requires_grad=True)
    last = whole.contiguous(memory_format=torch.channels_last)
    for x, is_taken in (
        (whole, True), (last, True), (whole[:, :4], False), (whole[..., ::2], False),
        (last[:, :, 1:], False), (whole.transpose(1, 2), True),
    ):  # fmt: skip
        taken.clear()
        i = NormArgs(x, None, None, 1e-5, (0, 2, 3))
        plan = Plan(i, SingleProcess(), weighting="element")
        y, _ = autograd.apply((plan, i), i.x, i.weight, i.bias, i.residual)
        assert taken[0].shape == x.shape
        assert (taken[0].stride() == x.stride()) is is_taken
        assert is_taken or taken[0].is_contiguous()
        saved: Any = y.grad_fn
        assert saved.saved_tensors[0].stride() == taken[0].stride()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_programs_that_sum_have_equal_shares(dtype: str, channels_last: bool) -> None:
    """The layers are ResNet-50's, on a GPU with 132 multiprocessors; no program has empty tiles."""
    done = needed = 0
    for C, h in [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (1024, 14), (2048, 7)]:
        last = int(channels_last)
        sums = tiling._sums((64 * h * h if last else 64, C, 1 if last else h * h), last,
                            getattr(torch, dtype), 4 * 132)  # fmt: skip
        outer, width, _, step, _, _, blocks, per_program, splits = sums.sizes
        tiles = triton.cdiv(outer, sums.constants["ROWS"])
        if not last:
            tiles *= triton.cdiv(width, step * sums.constants["VECTOR"])
        assert 0 <= splits * per_program - tiles < splits
        done, needed = done + blocks * splits * per_program, needed + blocks * tiles
    assert done < 1.05 * needed


def compile_for_a_gpu(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, fused: bool, **options: Any
) -> dict[str, Any]:
    """The stages of its compilation; parameters that are in neither are int64.

    No register spills, unless there are fewer than usual.
    """
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types.get(n, "i64") for n in names},
        {(names.index(n),): value for n, value in constants.items() if n in names},
        # Memory begins at multiples of 16 bytes.
        {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if types.get(n, "")[:1] == "*"
        },
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fused, **options}
    )
    assert spilled(compiled.asm["cubin"]) is ("maxnreg" in options)
    return dict(compiled.asm)


def spilled(cubin: bytes) -> bool:
    """Whether a kernel has memory for what its registers cannot hold."""
    tool = Path(nvidia.__file__).parent / "bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stack, local = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", told).groups()  # type: ignore[union-attr]
    return (stack, local) != ("0", "0")
