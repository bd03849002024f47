"""The Triton kernels, on a GPU and on the host through Triton's interpreter.

Triton reads at its import whether to interpret, so each runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

HERE = Path(__file__).parent
CHECKS = [str(HERE / name) for name in ("checks_kernels_cuda.py", "checks_kernels_cuda_steps.py")]


def _takes_int_of_an_array() -> bool:
    """As Triton 3.6 does, and 3.9 does no more."""
    triton = tuple(int(n) for n in metadata.version("triton").split(".")[:2])
    return triton < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.5.0"


@pytest.mark.parametrize("where", ["interpreter", "gpu"])
def test_the_checks(where: str) -> None:
    require.need("torch", "triton", *(["gpu"] if where == "gpu" else []))
    if where == "interpreter" and _takes_int_of_an_array():
        pytest.skip("Triton's interpreter takes int() of an array, which NumPy 2.5 refuses")
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


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64", None])
@pytest.mark.parametrize("channels_last", [True, False])
def test_they_compile_for_a_gpu(
    channels_last: bool, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is stricter than the interpreter, and needs no GPU; `dtype` of parameters."""
    require.need("triton")
    import triton

    from multibn.kernels import _triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants: dict[str, Any] = {"ROWS": 16, "COLS": 128, "CHANNELS_LAST": channels_last}
    constants |= {"DTYPE": triton.language.float32, "RELU": True, "tiles_per_program": 1}
    activations = ("x", "y", "dy", "dx", "residual")
    types: dict[str, Any] = dict.fromkeys(activations, "*bf16") | {"eps": "i64"}
    types |= dict.fromkeys(("partials", "mean", "var", "sum_dy", "sum_dy_xhat"), "*fp64")
    types["element_weight"] = "*fp64" if dtype else "i64"
    parameters = dict.fromkeys(("weight", "bias"), f"*{dtype}" if dtype else None)
    constants |= {n: None for n, v in parameters.items() if v is None}
    for kernel in (_triton.normalize, _triton.input_gradient):
        ptx = compile_for_a_gpu(kernel, types | parameters, constants, fused=True)
        assert "sqrt.rn.f64" in ptx
        assert not re.search(r"\b(div|sqrt|rsqrt)\S*f32", ptx)
    if dtype is None:
        for kernel in (_triton.moments, _triton.backward_sums):
            compile_for_a_gpu(kernel, types, constants, fused=True)


def test_the_merges_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require.need("triton")

    from multibn.kernels import _triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = ("partials", "mean", "var", "packed", "sum_dy", "sum_dy_xhat")
    types = dict.fromkeys(wide, "*fp64") | dict.fromkeys(("weight", "count", "eps"), "i64")
    for kernel in (_triton.merge_moments, _triton.merge_and_pack_moments, _triton.merge_sums):
        for block in (1, 1024):
            check_rounding(compile_for_a_gpu(kernel, types, {"BLOCK": block}, fused=False))


def test_unpacking_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require.need("triton")

    from multibn.kernels import _triton_steps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = ("summed", "mean", "var", "total_count", "element_weight")
    types = dict.fromkeys(wide, "*fp64") | dict.fromkeys(("weight", "count"), "i64")
    kernel = _triton_steps.unpack
    check_rounding(compile_for_a_gpu(kernel, types, {"BLOCK": 256}, fused=False))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("cumulative", [False, True])
def test_moving_compiles_for_a_gpu(
    cumulative: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dtype` is that of running statistics."""
    require.need("triton")

    from multibn.kernels import _triton_steps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("mean", "var", "count"), "*fp64") | {"num_batches": "*i64"}
    types |= dict.fromkeys(("running_mean", "running_var"), f"*{dtype}")
    types |= dict.fromkeys(("momentum", "factor"), "i64")
    constants: dict[str, Any] = {"CUMULATIVE": cumulative, "BLOCK": 256}
    for others in ({"UNBIASED": True}, {"UNBIASED": False, "num_batches": None}):
        if not (cumulative and "num_batches" in others):
            kernel = _triton_steps.move
            check_rounding(compile_for_a_gpu(kernel, types, constants | others, fused=False))


def check_rounding(ptx: str) -> None:
    """Arithmetic is float64, and each operation is rounded."""
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
