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
import io
import json
import os
import runpy
import selectors
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
from typing import Any, NamedTuple, NoReturn

import numpy as np

SUPPORTED = sys.platform == "linux" and hasattr(os, "pidfd_open")
NUM_SERVERS = 2
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
server = socket.socket(socket.AF_UNIX)
# The server has imported what reads these variables.
others = os.environ.get("OMP_NUM_THREADS") != "1" or "TRITON_INTERPRET" in os.environ
if others or server.connect_ex({address!r} + str(rank % {servers})):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
signals = signal.SIGTERM, signal.SIGINT
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
request = json.dumps([os.getpid(), sys.argv[1:], os.getcwd(), dict(os.environ),
                      list(os.sched_getaffinity(0))]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "little")], range(3))
server.sendall(request)
for stream in range(3):
    os.close(stream)  # the last writer's end is what readers wait for
def receive():
    # Without an answer, the server has ended, and its forks with it.
    return int.from_bytes(server.recv(8, socket.MSG_WAITALL) or os._exit(70), "little")
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


class Request(NamedTuple):
    """What a process of the command hands over."""

    pid: int
    arguments: list[str]
    directory: str
    variables: dict[str, str]
    cores: list[int]


@contextlib.contextmanager
def command(variables: dict[str, str]) -> Iterator[str]:
    """The path of the command, while the context lasts; the servers have these variables."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multibn-python-")))
        address = str(folder / "server")
        for number in range(NUM_SERVERS):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{address}{number}")
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
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


def _serve(listener: socket.socket) -> tuple[Request, list[int]]:
    """Make a fork for each request; returns in the forks only."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    forks: dict[int, tuple[int, socket.socket]] = {}  # process and connection, by either's file
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                _import_modules()
                connection, _ = listener.accept()
                request, streams = _receive(connection)
                pid = os.fork()
                if pid == 0:
                    for _, other in forks.values():
                        other.close()
                    connection.close()
                    listener.close()
                    selector.close()
                    return request, streams
                for stream in streams:
                    os.close(stream)
                # The process may be killed as soon as its fork has begun; its connection tells.
                with contextlib.suppress(OSError):
                    connection.sendall(pid.to_bytes(8, "little"))
                for file in (os.pidfd_open(pid), connection.fileno()):
                    forks[file] = pid, connection
                    selector.register(file, selectors.EVENT_READ)
            elif key.fd == 0:
                for pid, _ in forks.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif key.fd in forks:
                pid, connection = forks[key.fd]
                if key.fd == connection.fileno():
                    # The process of the command was killed.
                    os.kill(pid, signal.SIGKILL)
                    selector.unregister(key.fd)
                    continue
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    connection.sendall(status.to_bytes(8, "little"))
                for file in [file for file, fork in forks.items() if fork[0] == pid]:
                    del forks[file]
                    with contextlib.suppress(KeyError):
                        selector.unregister(file)
                os.close(key.fd)
                connection.close()


@functools.cache  # at the first request, once
def _import_modules() -> None:
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork's collections leave alone, and so do not copy, what is shared


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    text = connection.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
    return Request(*json.loads(text)), streams


def _getppid_of(pid: int) -> Callable[[], int]:
    """`os.getppid` as in the process `pid`: the launcher, or 1 once the launcher has ended."""
    own, getppid_of_fork = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != own:  # a rank has forked
            return getppid_of_fork()
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 1

    return getppid


def _become(request: Request, streams: list[int]) -> None:
    """Take on what the process of the command has, but for its number."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()
    os.chdir(request.directory)
    os.sched_setaffinity(0, request.cores)
    os.getppid = _getppid_of(request.pid)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [p for p in sys.path[1:] if p not in own]
    os.environ.clear()
    os.environ.update(request.variables)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *(p for p in others if p), *path]
    np.random.seed()  # noqa: NPY002


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            file,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str]) -> None:
    """Do as `python *arguments` does, with those options that tests use."""
    words = list(arguments)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-u":
            unbuffered = True
        else:
            action: Any = words.pop(0)
            warnings.simplefilter(action)
    _open_streams(unbuffered=unbuffered)
    first, *rest = words
    try:
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
            assert not first.startswith("-"), f"python {' '.join(arguments)}: unknown option"
            sys.argv = words
            sys.path[0] = os.path.dirname(os.path.realpath(first))
            runpy.run_path(first, run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        frame = sys._getframe()
        while frame.f_back:
            frame = frame.f_back
        # As of an exception that nobody has caught: from the frame that nobody has called.
        whole = types.TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, whole
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _end(code: Any, *, of_mpi4py: bool) -> NoReturn:
    """End as Python does, but without clearing modules: a fork would copy them all for that."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        # What mpi4py leaves to C's Py_AtExit. An error under `python -m mpi4py` ends all ranks.
        mpi.COMM_WORLD.Abort(code) if code and of_mpi4py else mpi.Finalize()
    os._exit(code or 0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _request, _streams = _serve(_listener)
    _become(_request, _streams)
    _of_mpi4py = "mpi4py" in _request.arguments
    try:
        _run(_request.arguments)
    except SystemExit as end:
        _end(end.code, of_mpi4py=_of_mpi4py)
    _end(0, of_mpi4py=_of_mpi4py)
