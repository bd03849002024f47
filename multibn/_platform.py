"""Libraries and launchers of this machine, found without importing or starting them."""

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
    """A name that the processes of one machine have in common, and no other machine's have."""
    # Names repeat where nobody chose them (localhost); the kernel's boot id does not.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text() if boot_id.exists() else ''}"


@cache
def pid_space() -> str:
    """An identifier of the pid namespace: where it is equal, pids can be compared."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def process_state(pid: int) -> str:
    """The letter that Linux has for the state of a process of this machine; "" if it has ended.

    "?" on a system without /proc, where no process is reported as lost.
    """
    try:
        # pid (name) state: the name may hold anything, brackets too.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
    return "" if letter in "ZX" else letter


def launched_processes() -> tuple[str, int]:
    """The variable in which a launcher says how many processes it started; ("", 1) if none does."""
    # OMPI_COMM_WORLD_SIZE: Open MPI; PMI_SIZE: MPICH, Intel MPI; WORLD_SIZE: torchrun; the last:
    # srun. SLURM_NTASKS would be set in a batch script, too, which is one process.
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    sizes = {name: int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()}
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 1))
    return (name, size) if size > 1 else ("", 1)


def importable(name: str) -> bool:
    """Whether the module `name` is installed, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a submodule
        return False


def how_to_build_core() -> str:
    """What to do if the compiled extensions are missing."""
    here = Path(__file__).parent
    folders = [Path(str(d.locate_file(here.name))) for d in metadata.distributions(name=here.name)]
    if hidden := [each for each in folders if each.exists() and not each.samefile(here)]:
        return f"The source tree {here} shadows the package in {hidden[0]}: run in another folder"
    return "Install a C compiler (gcc or clang) and Python's headers, then install multibn again"


def find_command(name: str) -> str | None:
    """Path of the command `name`: this environment's own if it has one, else the one on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)
