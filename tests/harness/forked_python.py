"""A command like `python`, whose processes find torch imported: each is a fork of a server.

To import torch, its compiler and Chainer takes a rank 5 s of processor time, more than most checks.
`command()` returns the path of a command that stands for `python`, for torchrun's and mpiexec's
ranks too. A new process of this command asks a server for a fork, and hands over its arguments,
files, variables, directory and cores. Signals go to the fork, and its end is the end of both.

A fork has the hash seed of its server, hence two servers: for even ranks, and for odd ones.
Imports, and other numbers of threads than one, are tested with `sys.executable`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

SUPPORTED = sys.platform == "linux" and hasattr(os, "pidfd_open")
NUM_SERVERS = 2
LONGEST = 2**17  # bytes of a request
MODULES = (
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",  # the compiler imports it at its first graph
    "torch.distributed.run",
    "torch.nn.parallel",
    "multibn.torch_backend",
    "multibn.chainer_backend",
)

# The process that is started. Without a server, it becomes Python.
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys

rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
# The server has imported what reads these variables.
others = os.environ.get("OMP_NUM_THREADS") != "1" or "TRITON_INTERPRET" in os.environ
if others or server.connect_ex({address!r} + str(rank % {servers})):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
signals = signal.SIGTERM, signal.SIGINT
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
request = [os.getpid(), sys.argv[1:], os.getcwd(), dict(os.environ), [*os.sched_getaffinity(0)]]
socket.send_fds(server, [json.dumps(request).encode()], range(3))
for stream in range(3):
    os.close(stream)  # the last writer's end is what readers wait for
def receive():
    # Without an answer, the server has ended, and its forks with it.
    return int(server.recv(8) or os._exit(70))
fork = receive()
for number in signals:
    signal.signal(number, lambda number, _: os.kill(fork, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = os.waitstatus_to_exitcode(receive())
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def command(variables: dict[str, str]) -> Iterator[str]:
    """The path of the command, while the context lasts; the servers have these variables."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multibn-python-")))
        address = str(folder / "server")
        for number in range(NUM_SERVERS):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(listener).bind(f"{address}{number}")
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                env=variables,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
            stack.callback(server.communicate)  # ends the server
        path = folder / "python"
        path.write_text(
            _COMMAND.format(python=sys.executable, address=address, servers=NUM_SERVERS)
        )
        path.chmod(0o755)
        yield str(path)


def _serve(listener: socket.socket) -> list[str]:
    """Make a fork for each request; returns in the forks only, with the arguments of `python`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets keepers that have ended
    files: list[Any] = [0, listener]
    while 0 not in select.select(files, [], [])[0]:
        _import_modules()
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(connection)
        connection.close()
    os._exit(0)


def _keep(connection: socket.socket) -> list[str]:
    """Make a fork, and end with it. The fork ends with its command, and with the server."""
    text, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
    launcher, arguments, *place = json.loads(text)
    if (pid := os.fork()) == 0:
        connection.close()
        _become(streams, _getppid_of(launcher), *place)
        return list(arguments)
    for stream in streams:
        os.close(stream)
    files: list[Any] = [0, connection, fork := os.pidfd_open(pid)]
    # The command may be killed as soon as its fork has begun; its connection tells.
    with contextlib.suppress(OSError):
        connection.send(str(pid).encode())
    if fork not in select.select(files, [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


@functools.cache  # at the first request, once
def _import_modules() -> None:
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork's collections leave alone, and so do not copy, what is shared


def _getppid_of(pid: int) -> Callable[[], int]:
    """`os.getppid` as in the process `pid`: the launcher, or 1 once the launcher has ended."""

    def getppid(own: int = os.getpid(), of_fork: Callable[[], int] = os.getppid) -> int:
        if os.getpid() != own:  # a rank has forked
            return of_fork()
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 1

    return getppid


def _become(
    streams: list[int],
    getppid: Callable[[], int],
    directory: str,
    variables: dict[str, str],
    cores: list[int],
) -> None:
    """Take on what the process of the command has, but for its number."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(directory)
    os.sched_setaffinity(0, cores)
    os.getppid = getppid
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:1] = ["", *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(words: list[str]) -> None:
    """Do as `python *words` does, with those options that tests use."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-u":
            unbuffered = True
        else:
            action: Any = words.pop(0)
            warnings.simplefilter(action)
    # Rows are enough: what a rank has printed is there when the rank hangs.
    sys.stdout.reconfigure(line_buffering=unbuffered)  # type: ignore[union-attr]
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is imported
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        assert not first.startswith("-"), f"python {' '.join(words)}: unknown option"
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        # As in Python, a program's variables outlive what runs at its exit.
        _PROGRAM.update(runpy.run_path(first, run_name="__main__"))


_PROGRAM: dict[str, Any] = {}


def _end(code: Any, *, of_mpi4py: bool) -> NoReturn:
    """End as Python does, but without clearing modules: a fork would copy them all for that."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        # What mpi4py leaves to C's Py_AtExit. An error under `python -m mpi4py` ends all ranks.
        mpi.COMM_WORLD.Abort(code) if code and of_mpi4py else mpi.Finalize()
    os._exit(code or 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _arguments = _serve(_listener)
    _of_mpi4py = "mpi4py" in _arguments
    try:
        _run(_arguments)
    except SystemExit as end:
        _end(end.code, of_mpi4py=_of_mpi4py)
    except BaseException as error:
        # As of an exception that nobody has caught: from the frame that nobody has called.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        _end(1, of_mpi4py=_of_mpi4py)
    _end(0, of_mpi4py=_of_mpi4py)
