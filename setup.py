"""Builds the C core of the kernels; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

CORE = Extension(
    "multibn.kernels._core",
    ["multibn/kernels/_core.c"],
    depends=["multibn/kernels/_widths.h", "multibn/kernels/_loops.h"],
    # Why no fused operations: see _core.c. Traps and errno would keep loops from being vectorized.
    extra_compile_args=[
        *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
    ],
    define_macros=[("Py_LIMITED_API", "0x030a0000")],
    py_limited_api=True,
    optional=True,  # without a compiler, the generic kernels are used: `multibn info` says so
)

setup(ext_modules=[CORE], options={"bdist_wheel": {"py_limited_api": "cp310"}})
