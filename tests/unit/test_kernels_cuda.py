"""The Triton kernels, on a GPU and on the host through Triton's interpreter.

Triton reads at its import whether to interpret, so each runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multibn._environment import importable
from tests.helpers import require

HERE = Path(__file__).parent
CHECKS = [str(HERE / name) for name in ("checks_kernels_cuda.py", "checks_kernels_cuda_steps.py")]


@pytest.mark.parametrize("where", ["interpreter", "gpu"])
def test_the_checks(where: str) -> None:
    require.need("torch")
    import torch

    if not importable("triton"):
        pytest.skip("triton is not available")
    if where == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU is available")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS],
        cwd=HERE.parents[1],
        env=os.environ
        | {"TRITON_INTERPRET": str(int(where == "interpreter")), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.mark.parametrize("channels_last", [True, False])
def test_they_compile_for_a_gpu(
    channels_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is stricter than the interpreter, and needs no GPU."""
    triton = pytest.importorskip("triton")

    from multibn.kernels import _triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"ROWS": 16, "COLS": 128, "CHANNELS_LAST": channels_last, "RELU": True}
    constants |= {"DTYPE": triton.language.float32, "BLOCK": 1024, "tiles_per_program": 1}
    activations = ("x", "y", "dy", "dx", "residual")
    wide = ("partials", "mean", "var", "scale", "shift", "dy_scale", "x_scale")
    types = dict.fromkeys(activations, "*bf16") | dict.fromkeys(wide, "*fp64")
    for kernel in (
        _triton.moments,
        _triton.merge_moments,
        _triton.normalize,
        _triton.backward_sums,
        _triton.input_gradient,
    ):
        compile_for_a_gpu(kernel, types, constants, fused=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64", None])
def test_the_steps_compile_for_a_gpu(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dtype` is that of parameters, where there are any, and of running statistics."""
    pytest.importorskip("triton")

    from multibn.kernels import _triton_steps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = (
        *("mean", "meansqr", "packed", "summed", "var", "of_all", "v", "quotient", "scale"),
        *("shift", "sum_dy", "sum_dy_xhat", "dy_scale", "x_scale"),
    )
    types = dict.fromkeys(wide, "*fp64") | dict.fromkeys(("count", "eps", "factor"), "i64")
    types |= dict.fromkeys(("element_weight", "momentum"), "*fp64")
    moving = ("running_mean", "running_var", "moved_mean", "moved_var")
    types |= dict.fromkeys(moving, f"*{dtype or 'fp64'}")
    parameters: dict[str, Any] = dict.fromkeys(("weight", "bias"), f"*{dtype}" if dtype else None)
    steps = [
        (_triton_steps.affine, parameters),
        (_triton_steps.gradient_coefficients, parameters),
        (_triton_steps.move_averages, {}),
    ]
    if dtype is None:
        steps += [(_triton_steps.over_std, {}), (_triton_steps.pack, {"weight": "i64"})]
        steps += [(_triton_steps.unpack, {"weight": "i64"})]
    for kernel, more in steps:
        constants = {"BLOCK": 256} | {n: None for n, v in more.items() if v is None}
        ptx = compile_for_a_gpu(kernel, types | more, constants, fused=False)
        assert "f64" in ptx
        assert not re.search(r"\bfma|\b(add|sub|mul|div|sqrt)\S*f32", ptx)


def compile_for_a_gpu(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], *, fused: bool
) -> str:
    """Its PTX; parameters that are in neither are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        {(names.index(n),): value for n, value in constants.items() if n in names},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fused}
    )
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])
