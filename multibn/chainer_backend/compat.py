"""Stand-ins that make Chainer 7.8.1 (2021) importable with today's NumPy, setuptools and CuPy.

Chainer's environment check imports numpy.distutils (removed in Python 3.12) and pkg_resources
(removed in setuptools 81). Chainer also reads numpy.sctypes (removed in NumPy 2) and imports
cupy.cuda.cublas (removed in CuPy 14). CuPy 14 has no cuDNN, either.
"""

import importlib.util
import os
import sys
import types

import numpy as np


def make_importable() -> None:
    """Install the stand-ins, unless Chainer is imported already.

    If CuPy has no cuDNN module (CuPy 14 and newer), this function sets the environment variable
    CHAINER_CUDNN=0, unless the variable is set. Otherwise Chainer would warn at import and advise
    installing cuDNN, which would not help.
    """
    if "chainer" in sys.modules:
        return
    # Chainer works without the check, which only warns about obsolete versions of packages.
    check = types.ModuleType("chainer._environment_check")
    check.check = lambda: None  # type: ignore[attr-defined]
    sys.modules["chainer._environment_check"] = check
    if not hasattr(np, "sctypes"):
        # Chainer reads these two entries.
        np.sctypes = {  # type: ignore[attr-defined]  # noqa: NPY201
            "int": [np.int8, np.int16, np.int32, np.int64],
            "float": [np.float16, np.float32, np.float64, np.longdouble],
        }
    _adapt_to_cupy()


def _adapt_to_cupy() -> None:
    try:
        import cupy.cuda
    except ImportError:
        return
    if importlib.util.find_spec("cupy.cuda.cudnn") is None:
        os.environ.setdefault("CHAINER_CUDNN", "0")
    try:
        import cupy.cuda.cublas
    except ImportError:
        try:
            from cupy_backends.cuda.libs import cublas
        except ImportError:  # CUDA's libraries are missing: Chainer then runs without CuPy
            return
        sys.modules["cupy.cuda.cublas"] = cupy.cuda.cublas = cublas
