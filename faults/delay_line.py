"""A network link with a delay, for kernels without netem: `python delay_line.py SECONDS A B`.

A and B are file descriptors of open TUN devices. A packet sent on one device arrives at the other
SECONDS later, in the same order. Bandwidth is not limited.
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
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000  # IP packets without a header before them
_MAX_PACKET = 65536


def start(seconds: float, ends: Sequence[tuple[str, str]]) -> subprocess.Popen[bytes]:
    """Connect two network namespaces; `ends` has the namespace and the device name of each end.

    Returns the process that moves packets. The devices vanish when that process ends, at the latest
    together with this one.
    """
    with contextlib.ExitStack() as stack:
        files = []
        for i, (namespace, name) in enumerate(ends):
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, fd)
            files.append(fd)
            device = f"mbtun{i}"
            request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(fd, _TUNSETIFF, request)
            move = ["ip", "link", "set", device, "netns", namespace, "name", name]
            subprocess.run(move, check=True)
        command = [sys.executable, __file__, str(seconds), *map(str, files)]
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], pass_fds=files)


def carry(seconds: float, a: int, b: int) -> None:
    """Move packets between two devices, forever."""
    in_flight: dict[int, deque[tuple[float, bytes]]] = {a: deque(), b: deque()}
    selector = selectors.DefaultSelector()
    for source, target in ((a, b), (b, a)):
        selector.register(source, selectors.EVENT_READ, target)
    while True:
        due = [queue[0][0] for queue in in_flight.values() if queue]
        wait = max(min(due) - time.monotonic(), 0.0) if due else None
        for key, _ in selector.select(wait):
            packet = os.read(key.fd, _MAX_PACKET)
            in_flight[key.data].append((time.monotonic() + seconds, packet))
        now = time.monotonic()
        for target, queue in in_flight.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # the device is down: drop the packet
                    os.write(target, queue.popleft()[1])


if __name__ == "__main__":
    carry(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
