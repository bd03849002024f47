"""A line that takes its time, for kernels without netem: `python delay_line.py SECONDS A B`.

A and B are numbers of open TUN devices. What one is given to send comes out of the other so many
seconds later, in the same order, however much is under way.
"""

import contextlib
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000  # packets of IP, and nothing before them
_LARGEST = 65536


def start(seconds: float, ends: Sequence[tuple[str, str]]) -> subprocess.Popen[bytes]:
    """Join two network namespaces, each end being a namespace and what its device is called.

    The devices are gone when the process has ended, which it does with this one at the latest.
    """
    with contextlib.ExitStack() as stack:
        files = []
        for i, (namespace, name) in enumerate(ends):
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, fd)
            files.append(fd)
            made = f"mbtun{i}"
            request = struct.pack("16sH22x", made.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(fd, _TUNSETIFF, request)
            moved = ["ip", "link", "set", made, "netns", namespace, "name", name]
            subprocess.run(moved, check=True)
        command = [sys.executable, __file__, str(seconds), *map(str, files)]
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], pass_fds=files)


def carry(seconds: float, a: int, b: int) -> None:
    """Move packets between two devices, for ever."""
    under_way: dict[int, deque[tuple[float, bytes]]] = {a: deque(), b: deque()}
    selector = selectors.DefaultSelector()
    for source, target in ((a, b), (b, a)):
        selector.register(source, selectors.EVENT_READ, target)
    while True:
        due = [queue[0][0] for queue in under_way.values() if queue]
        wait = max(min(due) - time.monotonic(), 0.0) if due else None
        for key, _ in selector.select(wait):
            packet = os.read(key.fd, _LARGEST)
            under_way[key.data].append((time.monotonic() + seconds, packet))
        now = time.monotonic()
        for target, queue in under_way.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # a device that is down takes nothing
                    os.write(target, queue.popleft()[1])


if __name__ == "__main__":
    carry(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
