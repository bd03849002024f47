"""Sums over TCP connections, with ranks as threads."""

import contextlib
import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multibn.communicators.transports import tcp
from multibn.communicators.transports.tcp import _STRANGERS, Connections, partners_of
from multibn.communicators.watch import RankLeftError
from tests.helpers import require

require.need("torch")

import torch.distributed as dist  # noqa: E402

SECONDS = 30.0


def _on_ranks(size: int, work: Any) -> list[Any]:
    """What `work(connections, rank)` returns on each rank."""
    store = dist.HashStore()

    def rank_work(rank: int) -> Any:
        connections = Connections(store, rank, size)
        assert connections.opened(SECONDS)
        try:
            return work(connections, rank)
        finally:
            connections.close(goodbye=False)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_work, rank) for rank in range(size)]
        return [future.result(SECONDS) for future in futures]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_sums_are_right_and_equal_bit_for_bit(size: int) -> None:
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((), np.float64), ((0,), np.float32), ((3, 2), np.int64), ((70_000,), np.float64),
        ((5,), np.float16),
    ]  # fmt: skip

    def work(connections: Connections, rank: int) -> list[Any]:
        numbers = np.random.default_rng(rank)
        mine = [np.asarray(3 * numbers.normal(size=shape), dtype) for shape, dtype in shapes]
        sums = [a.copy() for a in mine]
        for number, a in enumerate(sums):
            assert connections.begin(number, a)(SECONDS)
        return [mine, sums]

    results = _on_ranks(size, work)
    for i, (shape, dtype) in enumerate(shapes):
        sums = [summed[i] for _, summed in results]
        exact = sum(mine[i].astype(np.float64) for mine, _ in results)
        assert all((a.shape, a.dtype) == (shape, dtype) for a in sums)
        assert len({a.tobytes() for a in sums}) == 1
        np.testing.assert_allclose(sums[0], exact, atol=size * 30 * _eps(dtype))


def _eps(dtype: Any) -> float:
    return float(np.finfo(dtype).eps) if issubclass(dtype, np.floating) else 0.0


@pytest.mark.parametrize("size", [2, 16, 64, 1000, 1024])
def test_connections_grow_with_the_logarithm_of_the_ranks(size: int) -> None:
    partners = [partners_of(rank, size) for rank in range(size)]
    assert max(map(len, partners)) <= math.log2(size) + 1
    assert all(rank in partners[partner] for rank in range(size) for partner in partners[rank])


def test_unlike_messages_are_not_added() -> None:
    def work(connections: Connections, rank: int) -> tuple[bool, Any]:
        a = np.ones(3 + 2 * rank)
        done = connections.begin(0, a)
        return done(0.2), a

    for finished, a in _on_ranks(2, work):
        assert not finished
        np.testing.assert_array_equal(a, 1.0)


def test_the_end_of_a_partner_is_seen() -> None:
    for goodbye, kind, message in (
        (True, RankLeftError, "rank 1 has left"),
        (False, RuntimeError, "the connection with rank 1: "),
    ):

        def work(connections: Connections, rank: int, goodbye: bool = goodbye) -> Any:
            if rank == 1:
                connections.close(goodbye=goodbye)
                return None
            try:
                connections.begin(0, np.ones(3))(SECONDS)
            except RuntimeError as error:
                return error

        raised, _ = _on_ranks(2, work)
        assert type(raised) is kind
        assert str(raised).startswith(message)


def test_strangers_are_turned_away() -> None:
    """Programs that connect by mistake, and go, say something else, or stay and say nothing."""
    store = dist.HashStore()
    first: Any = None
    ready = threading.Event()

    def rank_0() -> float:
        nonlocal first
        first = Connections(store, 0, 2)
        ready.set()
        assert first.opened(SECONDS)
        a = np.ones(1)
        assert first.begin(0, a)(SECONDS)
        return a.item()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rank_0)
        assert ready.wait(SECONDS)
        address, port, code = json.loads(store.get("address of 0"))
        for said in (b"GET / HTTP/1.1\r\n\r\n" + bytes(30), bytes(24), b""):
            with socket.create_connection((address, port)) as stranger:
                stranger.sendall(said)
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(bytes.fromhex(code)[:-1] + bytes(9))
        silent = [socket.create_connection((address, port)) for _ in range(_STRANGERS + 6)]
        silent[-1].sendall(bytes.fromhex(code)[:5])
        start = time.monotonic()
        second = Connections(store, 1, 2)
        assert second.opened(SECONDS)
        a = np.ones(1)
        assert second.begin(0, a)(SECONDS)
        assert future.result(SECONDS) == a.item() == 2
        assert time.monotonic() - start < 1  # nobody waits for those who say nothing
    for stranger in silent:
        stranger.settimeout(SECONDS)
        with stranger, contextlib.suppress(ConnectionResetError):
            assert not stranger.recv(1)  # the rank keeps no connection with them
    assert not store.check(["address of 0"])
    first.close(goodbye=False)
    second.close(goodbye=False)


def test_interfaces_with_ipv6_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their address is in the system's list; ranks connect by it."""
    addresses = tmp_path / "if_inet6"
    of_link, of_all = f"fe80{0:026x}01 04 40 20 80", f"{0:031x}1 01 80 10 80"
    addresses.write_text(f"{of_link} eth9\n{of_all} eth9\n{of_link} eth8\n")
    monkeypatch.setattr(tcp, "_IPV6_ADDRESSES", addresses)
    # Without GLOO_SOCKET_IFNAME, which the launches beside this test would read, too.
    with pytest.raises(RuntimeError, match="the interface 'eth8' of GLOO_SOCKET_IFNAME has no"):
        tcp._address_of("eth8")  # has an address of its link alone
    monkeypatch.setattr(tcp, "find_address", lambda: tcp._address_of("eth9"))
    assert tcp.find_address() == "::1"

    def work(connections: Connections, rank: int) -> tuple[Any, float]:
        a = np.full(3, 1.0 + rank)
        assert connections.begin(0, a)(SECONDS)
        return connections._sockets[1 - rank].family, a[0]

    assert _on_ranks(2, work) == [(socket.AF_INET6, 3.0)] * 2
