"""What this machine has: libraries and launchers, found without importing or starting them."""

import difflib
import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def this_machine() -> str:
    """What the processes of one machine have in common, and no other machine's have."""
    # Names repeat where nobody chose them (localhost); the kernel's boot id does not.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text() if boot_id.exists() else ''}"


def process_state(pid: int) -> str:
    """The letter that Linux has for the state of a process of this machine; "" if it has ended."""
    try:
        # pid (name) state: the name may hold anything, brackets too.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def nearest(name: str, names: Iterable[str], most: int = 3) -> str:
    """Names that were perhaps meant, for the message that refuses `name`; "" if none is near."""
    near = [repr(other) for other in difflib.get_close_matches(name, list(names), most)]
    return f", the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else ""


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
