"""Queries about the machine, its processes and installed libraries; imports no library."""

import importlib.util
import os
import platform
import secrets
import shutil
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def this_machine() -> str:
    """Return a name that all processes on this machine share, and that no other machine has."""
    # Host names may repeat (localhost); boot ids of the kernel do not.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text() if boot_id.exists() else ''}"


@cache
def pid_space() -> str:
    """Return an identifier of the pid namespace; pids are comparable within one namespace."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def process_state(pid: int) -> str:
    """Return Linux's letter for the state of a process; "" if the process has ended.

    Returns "?" on a system without /proc, where a lost process cannot be detected.
    """
    try:
        # "pid (name) state": the name may contain parentheses.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
    return "" if letter in "ZX" else letter


def launched_processes() -> tuple[str, int]:
    """Return the launcher's variable and its number of processes; ("", 1) without a launcher."""
    # Open MPI; MPICH and Intel MPI; torchrun; srun. SLURM_NTASKS is also set in a batch script,
    # which is one process.
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    sizes = {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 1))
    return (name, size) if size > 1 else ("", 1)


def importable(name: str) -> bool:
    """Return whether the module `name` can be found, without importing the module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def how_to_build_core() -> str:
    """Return the advice to a user whose compiled extensions are missing."""
    here = Path(__file__).parent
    folders = [Path(str(d.locate_file(here.name))) for d in metadata.distributions(name=here.name)]
    if shadowed := [each for each in folders if each.exists() and not each.samefile(here)]:
        return f"The source tree {here} shadows the package in {shadowed[0]}: run in another folder"
    return "Install a C compiler (gcc or clang) and Python's headers, then install multibn again"


def find_command(name: str) -> str | None:
    """Return the path of a command: from this Python environment if possible, else from PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)
