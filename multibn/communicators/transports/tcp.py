"""Sums over TCP connections, of which a rank has few, however many ranks and layers there are.

The ranks sum by recursive doubling: ranks whose numbers differ in one bit exchange what they have
summed so far, for one bit after the other. So a rank has log2(size) connections, and a sum takes as
many steps. All ranks add the same pairs, so that the sums are equal bit for bit. Ranks beyond the
largest power of two hand their numbers to a rank below, and get back the sum.

Each message has a head, which names the line, the dtype and the shape. Unlike messages are never
added: a rank that receives another head than its own waits, until notices say where the ranks are.
"""

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from multibn.communicators.lines import HostArray
from multibn.communicators.watch import Done, RankLeftError

_HEAD = struct.Struct("<iIq")  # the line's number, a fingerprint of dtype and shape, bytes
_HELLO = struct.Struct("<16sq")  # the listening rank's code, the number of the rank that connects
_STRANGERS = 64  # connections that may be silent while the partners connect
_NAP = 1e-3  # seconds
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # address, index, bits, scope, flags, interface
_LINK = "20"  # the scope of addresses that are valid on one link only

_GOODBYE = _HEAD.pack(-1 << 31, 0, 0)

# Pieces of work. Between two, sockets and the events of which one is awaited; none for a nap.
_Work: TypeAlias = Iterator[list[tuple[socket.socket, int]]]


class Connections:
    """One rank's TCP connections with the ranks that it exchanges messages with.

    Parameters
    ----------
    store
        Where the ranks leave their addresses for each other: a store of torch.distributed.
    rank, size
        Of this process.
    names
        The numbers of the ranks for people; default: 0, 1 and so on.
    """

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int] | None = None
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._names = range(size) if names is None else names
        self._power = _power_in(size)
        self._sockets: dict[int, socket.socket] = {}
        self.opened = _begun(self._open())

    def begin(self, number: int, a: HostArray) -> Done:
        """Begin to sum `a` over the ranks, in place, in a line of this number."""
        return _begun(self._sum(number, a))

    def close(self, *, goodbye: bool) -> None:
        """Close this process's end of the connections; the ends of its forks, or parent, stay."""
        for connection in self._sockets.values():
            if goodbye:
                with contextlib.suppress(OSError):
                    connection.send(_GOODBYE)
            connection.close()

    def _open(self) -> _Work:
        """Connect with lower ranks, then let higher ones connect."""
        partners = partners_of(self._rank, self._size)
        higher = {partner for partner in partners if partner > self._rank}
        for partner in sorted(partners - higher):
            yield from self._connect(partner)
        if higher:
            yield from self._let_connect(higher)
        for connection in self._sockets.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, partner: int) -> _Work:
        key = f"address of {partner}"
        while not self._store.check([key]):
            yield []
        address, port, code = json.loads(self._store.get(key))
        connection = self._sockets[partner] = socket.socket(_family(address))
        connection.setblocking(False)
        error = connection.connect_ex((address, port))
        if error == errno.EINPROGRESS:
            yield [(connection, select.POLLOUT)]
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise RuntimeError(
                f"no connection with rank {self._names[partner]} at {address}, port {port}: "
                f"{os.strerror(error)}"
            )
        connection.send(_HELLO.pack(bytes.fromhex(code), self._rank))

    def _let_connect(self, partners: set[int]) -> _Work:
        key, code, address = f"address of {self._rank}", secrets.token_bytes(16), find_address()
        said: dict[socket.socket, bytes] = {}  # by those who have not said hello yet
        with socket.create_server((address, 0), family=_family(address)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._store.set(key, json.dumps([address, port, code.hex()]))
            try:
                while not partners <= self._sockets.keys():
                    yield [(each, select.POLLIN) for each in (listener, *said)]
                    self._accept(listener, said)
                    self._hear(said, code)
            finally:
                for stranger in said:
                    stranger.close()
        # A later group may use the store, and have the same name.
        self._store.delete_key(key)

    def _accept(self, listener: socket.socket, said: dict[socket.socket, bytes]) -> None:
        with contextlib.suppress(OSError):  # anybody may connect, and go away
            connection, _ = listener.accept()
            connection.setblocking(False)
            said[connection] = b""
        if len(said) > _STRANGERS:
            eldest = next(iter(said))
            del said[eldest]
            eldest.close()

    def _hear(self, said: dict[socket.socket, bytes], code: bytes) -> None:
        """Read what has come; nobody waits for a stranger who says nothing."""
        for connection in list(said):
            try:
                more = connection.recv(_HELLO.size - len(said[connection]))
            except BlockingIOError:
                continue
            except OSError:
                more = b""
            said[connection] += more
            hello = said[connection]
            if more and len(hello) < _HELLO.size:
                continue
            del said[connection]
            if more and secrets.compare_digest(hello[: len(code)], code):
                self._sockets[_HELLO.unpack(hello)[1]] = connection
            else:
                connection.close()

    def _sum(self, number: int, a: HostArray) -> _Work:
        head = _HEAD.pack(number, zlib.crc32(f"{a.dtype} {a.shape}".encode()), a.nbytes)
        rows = np.empty((2, len(head) + a.nbytes), np.uint8)
        total, other = (row[len(head) :].view(a.dtype) for row in rows)
        mine, theirs = memoryview(rows[0]), memoryview(rows[1])
        nothing = mine[:0]
        mine[: len(head)] = head
        total[:] = a.reshape(-1)
        above = self._rank + self._power
        if self._rank >= self._power:  # the answer comes when all has been sent
            yield from self._exchange(self._rank - self._power, head, mine, mine)
        else:
            if above < self._size:
                yield from self._exchange(above, head, nothing, theirs)
                total += other
            for bit in range(self._power.bit_length() - 1):
                yield from self._exchange(self._rank ^ 1 << bit, head, mine, theirs)
                total += other
            if above < self._size:
                yield from self._exchange(above, head, mine, nothing)
        a.reshape(-1)[:] = total

    def _exchange(
        self, partner: int, head: bytes, sending: memoryview, receiving: memoryview
    ) -> _Work:
        connection = self._sockets[partner]
        sent = received = 0
        try:
            while True:
                if sent < len(sending):
                    with contextlib.suppress(BlockingIOError):
                        sent += connection.send(sending[sent:])
                to_send, to_receive = sent < len(sending), received < len(receiving)
                if not (to_send or to_receive):
                    return
                yield [(connection, select.POLLOUT * to_send | select.POLLIN * to_receive)]
                if to_receive:
                    with contextlib.suppress(BlockingIOError):
                        count = connection.recv_into(receiving[received:])
                        if not count:
                            raise ConnectionError("closed by the other side")
                        received += count
                    if received >= len(head) and receiving[: len(head)] != head:
                        yield from _meet_another(
                            self._names[partner], bytes(receiving[: len(head)])
                        )
        except OSError as error:
            raise _end_of(connection, self._names[partner], error) from error


def _end_of(connection: socket.socket, partner: int, error: OSError) -> RuntimeError:
    """What to raise for a connection that has ended."""
    with contextlib.suppress(OSError):  # what was said before the end may be unread
        while said := connection.recv(2**16):
            if said.endswith(_GOODBYE):
                return RankLeftError(partner)
    return RuntimeError(f"the connection with rank {partner}: {error}")


def partners_of(rank: int, size: int) -> set[int]:
    """The ranks that a rank exchanges messages with."""
    power = _power_in(size)
    if rank >= power:
        return {rank - power}
    partners = {rank ^ 1 << bit for bit in range(power.bit_length() - 1)}
    return partners | {rank + power} if rank + power < size else partners


def _power_in(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def _meet_another(partner: int, head: bytes) -> _Work:
    if head == _GOODBYE:
        raise RankLeftError(partner)
    while True:
        yield []


def find_address() -> str:
    """The address that torch would choose: of GLOO_SOCKET_IFNAME's first interface, or of the name.

    torch spreads its connections over all interfaces that are named there.

    Raises
    ------
    RuntimeError
        If there is no such interface, or it has no address that others can use.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return _address_of(interface)
    with contextlib.suppress(OSError):
        for family, _, _, _, (address, *_) in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family) as trial:
                trial.bind((address, 0))
                return str(address)
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    """An IPv4 address, or where the interface has none, an IPv6 address."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            name = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, name)[20:24])
    except OSError as error:
        address = _ipv6_address_of(interface)
        if address is None:
            raise RuntimeError(
                f"the interface {interface!r} of GLOO_SOCKET_IFNAME has no IPv4 address here: "
                f"{error}. "
                f"The interfaces are {', '.join(name for _, name in socket.if_nameindex())}."
            ) from error
        return address


def _ipv6_address_of(interface: str) -> str | None:
    """None also where the only one is valid on one link: others cannot know by which name."""
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != _LINK:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _begun(work: _Work) -> Done:
    """Do the first piece of `work`; the other pieces are done in what is returned."""
    return partial(_go_on, work, [next(work, _END)])


def _go_on(work: _Work, awaited: list[Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while awaited[0] is not _END:
        left = deadline - time.monotonic()
        if awaited[0]:
            poll = select.poll()
            for connection, events in awaited[0]:
                poll.register(connection, events)
            if not poll.poll(max(1000 * left, 0.0)):
                return False
        elif left <= 0:
            return False
        else:
            time.sleep(min(_NAP, left))
        awaited[0] = next(work, _END)
    return True


_END = object()
