"""Chainer's import beside each version of CuPy, with stand-ins for CuPy on machines without one."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch

# A module whose every name is a class, but for the modules that not every CuPy has.
ANY_NAME = """
def __getattr__(name):
    if name.startswith("__") or name in ("cublas", "cudnn"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *arguments, **options: None})
"""
DECORATORS = "memoize = fuse = lambda *arguments, **options: lambda function: function"
WITHOUT_CUDA = 'raise ImportError("libcublas.so.12: cannot open shared object file")'
IMPORT = """
import json, os
import multibn.chainer_backend
import chainer
import numpy as np
layer = multibn.chainer_backend.MultiNodeBatchNormalization(2, multibn.SingleProcess())
y = layer(np.arange(6, dtype=np.float32).reshape(3, 2)).array
print(json.dumps({
    "available": chainer.cuda.available,
    "cudnn": chainer.backends.cuda.cudnn_enabled,
    "CHAINER_CUDNN": os.environ.get("CHAINER_CUDNN"),
    "mean": float(abs(y.mean())),
}))
"""


def install(version: str, folder: Path, *, cublas: str = "") -> None:
    """Write a stand-in for CuPy with the modules that this version has."""
    modules = {
        "cupy/__init__": f"__version__ = {version!r}\n{DECORATORS}\n{ANY_NAME}",
        "cupy/_util": "class PerformanceWarning(Warning): ...",
        "cupy/cuda/__init__": ANY_NAME,
        "cupy_backends/cuda/libs/cublas": cublas,
        "cupyx/__init__": ANY_NAME,
        "cupyx/scipy/linalg": "",
        "cupyx/scipy/special": "",
    }
    if version.startswith("13"):
        modules |= {
            "cupy/cudnn": f"getVersion = lambda: 8900\n{ANY_NAME}",
            "cupy/cuda/cudnn": f"getVersion = lambda: 8900\n{ANY_NAME}",
            "cupy/cuda/cublas": "from cupy_backends.cuda.libs.cublas import *",
        }
    for name, text in modules.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "version, options, variable, expected",
    [
        ("13.6.0", {}, None, (True, True, None)),
        ("14.2.0", {}, None, (True, False, "0")),
        # The user has asked for cuDNN, and Chainer warns.
        ("14.2.0", {}, "1", "cuDNN is not enabled"),
        ("14.2.0", {"cublas": WITHOUT_CUDA}, None, (False, False, "0")),
    ],
)
def test_chainer_is_imported_without_a_warning_beside_each_cupy(
    version: str,
    options: dict[str, Any],
    variable: str | None,
    expected: tuple[bool, bool, str | None] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("the stand-in is for machines without CuPy")
    install(version, tmp_path, **options)
    monkeypatch.delenv("CHAINER_CUDNN", raising=False)
    if variable:
        monkeypatch.setenv("CHAINER_CUDNN", variable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = launch.captured(sys.executable, "-W", "error", "-c", IMPORT)
    if isinstance(expected, str):
        assert run.returncode != 0
        assert expected in run.stderr
        return
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert (facts["available"], facts["cudnn"], facts["CHAINER_CUDNN"]) == expected
    assert facts["mean"] < 1e-6
