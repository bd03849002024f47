"""`python -m benchmarks.gpu`: what is missing is said before anything slow is imported."""

import ctypes
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path


def missing(arguments: Sequence[str]) -> Iterator[str]:
    """A line for each thing without which every part would fail."""
    for module, package in (("numpy", "numpy"), ("array_api_compat", "array-api-compat"),
                            ("torch", "torch"), ("triton", "triton")):  # fmt: skip
        if find_spec(module) is None:
            yield f"{package} is missing: pip install {package}"
    if {"--stand-ins", "-h", "--help"} & set(arguments):
        return
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        version = Path(torch.origin).with_name("version.py")
        if version.exists() and "cuda: Optional[str] = None" in version.read_text():
            yield "this torch is built without CUDA: install one that has CUDA"
    if not shutil.which("gcc") and not shutil.which("clang") and not shutil.which("cc"):
        yield "a C compiler is missing, by which Triton makes its launchers: install gcc"
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            yield "a GPU is missing: the driver finds none"
    except OSError:
        yield "a GPU is missing: this machine has no driver, libcuda.so.1. Try --stand-ins"


if __name__ == "__main__":
    if lines := list(missing(sys.argv[1:])):
        print(*lines, sep="\n", file=sys.stderr)
        sys.exit(2)
    from benchmarks.gpu.command import main

    sys.exit(main())
