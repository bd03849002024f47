"""The Triton kernels, on a GPU and on the host through Triton's interpreter.

Triton reads at its import whether to interpret, so each runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multibn._environment import importable
from tests.helpers import require

CHECKS = Path(__file__).with_name("checks_kernels_cuda.py")


@pytest.mark.parametrize("where", ["interpreter", "gpu"])
def test_the_checks(where: str) -> None:
    require.need("torch")
    import torch

    if not importable("triton"):
        pytest.skip("triton is not available")
    if where == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU is available")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        cwd=Path(__file__).parents[2],
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
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
            {(names.index(n),): value for n, value in constants.items() if n in names},
        )
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
        )
        assert compiled.asm["cubin"]
