"""Builds the C parts: the core of the kernels, and waiting in shared memory. See pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

CORE = Extension(
    "multibn.kernels.core._core",
    ["multibn/kernels/core/_core.c"],
    depends=sorted(glob("multibn/kernels/core/_*.h")),
    # Why no fused operations: see _core.c. Traps and errno would keep loops from being vectorized.
    # Some loops take 1.2 of their time if they begin in the middle of a cache line.
    extra_compile_args=[
        *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        "-falign-loops=64",
    ],
    define_macros=[("Py_LIMITED_API", "0x030a0000")],
    py_limited_api=True,
    optional=True,  # without a compiler, the generic kernels are used: `multibn info` says so
)

SHARED_MEMORY = Extension(
    "multibn.communicators.transports._shared_memory",
    ["multibn/communicators/transports/_shared_memory.c"],
    extra_compile_args=["-std=c11", "-O3"],
    define_macros=[("Py_LIMITED_API", "0x030a0000")],
    py_limited_api=True,
    optional=True,  # for Linux; elsewhere ranks of one machine use the network
)

setup(ext_modules=[CORE, SHARED_MEMORY], options={"bdist_wheel": {"py_limited_api": "cp310"}})
