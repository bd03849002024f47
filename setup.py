"""Builds the C parts, the core of the kernels and waiting in shared memory, and the description.

All else is in pyproject.toml.
"""

import re
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info


def standalone(readme: str, repository: str) -> str:
    """The text of README with links and pictures that lead into the repository.

    Without the repository's address links become their words, and pictures are left out.
    """
    readme = re.sub(r"<!--.*?-->\n*", "", readme, flags=re.DOTALL)
    local = r"\((?![a-z]+:)([^)]+)\)"
    if not repository:
        return re.sub(rf"\[([^]]+)\]{local}", r"\1", re.sub(rf"!\[[^]]*\]{local}\n*", "", readme))
    readme = re.sub(rf"(!\[[^]]*\]){local}", rf"\1({repository}/raw/HEAD/\2)", readme)
    return re.sub(rf"\]{local}", rf"]({repository}/blob/HEAD/\1)", readme)


class Metadata(egg_info):
    """A package index shows the description where README's neighbours are not."""

    def run(self) -> None:
        """Write the metadata."""
        metadata = self.distribution.metadata
        repository = dict(metadata.project_urls or {}).get("Repository", "")
        metadata.long_description = standalone(metadata.long_description, repository)
        super().run()


class OrNone(build_ext):
    """Where a part cannot be built, no older one stays: Python would call what is not there."""

    def build_extension(self, ext: Extension) -> None:
        """Build a part."""
        try:
            super().build_extension(ext)
        except Exception:
            file = self.get_ext_filename(self.get_ext_fullname(ext.name))
            for folder in (".", self.build_lib):
                Path(folder, file).unlink(missing_ok=True)
            raise


CORE = Extension(
    "multibn.kernels.core._core",
    ["multibn/kernels/core/_core.c"],
    depends=sorted(glob("multibn/kernels/core/_*.h")),
    # Why no fused operations: see _core.c. Traps and errno would keep loops from being vectorized.
    # Some loops take 1.2 of their time if they begin in the middle of a cache line.
    extra_compile_args=[
        *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        *("-falign-loops=64", "-pthread"),
    ],
    extra_link_args=["-pthread", "-ldl"],  # libdl: a part of the C library since glibc 2.34
    define_macros=[("Py_LIMITED_API", "0x030a0000")],
    py_limited_api=True,
    optional=True,  # without a compiler, the reference kernels are used: `multibn info` says so
)

SHARED_MEMORY = Extension(
    "multibn.communicators.transports._shared_memory",
    ["multibn/communicators/transports/_shared_memory.c"],
    extra_compile_args=["-std=c11", "-O3"],
    define_macros=[("Py_LIMITED_API", "0x030a0000")],
    py_limited_api=True,
    optional=True,  # for Linux; elsewhere ranks of one machine use the network
)

setup(
    ext_modules=[CORE, SHARED_MEMORY],
    cmdclass={"egg_info": Metadata, "build_ext": OrNone},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
