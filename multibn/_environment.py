"""Libraries and launchers of this machine, found without importing or starting them."""

import importlib.util
import os
import platform
import secrets
import shutil
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def this_machine() -> str:
    """A name that the processes of one machine have in common, and no other machine's have."""
    # Names repeat where nobody chose them (localhost); the kernel's boot id does not.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text() if boot_id.exists() else ''}"


@cache
def pid_space() -> str:
    """Equal for processes that know each other by their pids: containers have pids of their own."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def process_state(pid: int) -> str:
    """The letter that Linux has for the state of a process of this machine; "" if it has ended.

    "?" where the system has no /proc, so that nobody is taken for lost there.
    """
    try:
        # pid (name) state: the name may hold anything, brackets too.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "?"
    return "" if letter in "ZX" else letter


def ended_ranks() -> set[int]:
    """The ranks that torchrun has started on this machine and that have ended, as far as is known.

    Once the ranks have met: torchrun starts the processes of a machine one after the other.
    """
    names = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    run, *numbers = (os.environ.get(name, "") for name in names)
    if not run or not all(number.isdigit() for number in numbers):
        return set()
    rank, local_rank, local_size = map(int, numbers)
    living = set()
    for listed in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        children = ""
        with suppress(OSError):  # of a thread that ends meanwhile
            children = listed.read_text()
        for pid in children.split():
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                of_rank = dict(entry.partition("=")[::2] for entry in variables.split("\0"))
                if of_rank.get(names[0]) == run:  # an ended process that torchrun keeps has none
                    living.add(int(of_rank["RANK"]))
    first = rank - local_rank
    return set(range(first, first + local_size)) - living if rank in living else set()


def importable(name: str) -> bool:
    """Whether the module `name` is installed, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a submodule
        return False


def find_command(name: str) -> str | None:
    """Path of the command `name`: this environment's own if it has one, else the one on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)
