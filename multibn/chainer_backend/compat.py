"""What makes Chainer 7.8.1 importable on today's NumPy, setuptools and CuPy.

Chainer's last release is of 2021. Two things stop `import chainer` today: its environment check
imports numpy.distutils (gone with Python 3.12) and pkg_resources (gone with setuptools 81), and it
reads numpy.sctypes (gone with NumPy 2). CuPy 14 has no cupy.cuda.cublas, which Chainer imports.
"""

import sys
import types

import numpy as np


def make_importable() -> None:
    """Put stand-ins where Chainer looks for what is gone; nothing if Chainer is loaded already."""
    if "chainer" in sys.modules:
        return
    # The check only warns, of Chainer versions and libraries that no longer exist.
    check = types.ModuleType("chainer._environment_check")
    check.check = lambda: None  # type: ignore[attr-defined]
    sys.modules["chainer._environment_check"] = check
    if not hasattr(np, "sctypes"):
        np.sctypes = {  # type: ignore[attr-defined]  # noqa: NPY201
            "int": [np.int8, np.int16, np.int32, np.int64],
            "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
            "float": [np.float16, np.float32, np.float64, np.longdouble],
            "complex": [np.complex64, np.complex128, np.clongdouble],
            "others": [bool, object, bytes, str, np.void],
        }
    _stand_in_for_cublas()


def _stand_in_for_cublas() -> None:
    try:
        import cupy.cuda
    except ImportError:
        return
    try:
        import cupy.cuda.cublas
    except ImportError:
        from cupy_backends.cuda.libs import cublas

        sys.modules["cupy.cuda.cublas"] = cublas
        cupy.cuda.cublas = cublas
