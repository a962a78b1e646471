"""The addresses of host names, for what the kernel knows of connections by address only."""

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from dlion_worker.tcp_connections import Address, address_of, plain

LOOK_UP_EVERY_S: Final = 60.0
"""Shortest time between look-ups of one host name. Its addresses may change, which a new connection
follows."""


class _KnownName(NamedTuple):
    addresses: frozenset[Address] = frozenset()
    looked_up_s: float = -math.inf
    """When it was looked up last, whether or not it was found."""


class HostNames:
    """The addresses of host names, as the system's resolver has them. Thread-safe.

    A thread looks them up: a resolver may take many seconds, and nothing waits for it, not even the
    end of the process. It asks for one name after another, so many names that no server answers
    take minutes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _KnownName] = {}
        self._is_busy = False

    def addresses(self, name: str) -> frozenset[Address]:
        """The addresses found so far; an address is its own."""
        own = address_of(name)
        return self._known.get(name, _KnownName()).addresses if own is None else frozenset({own})

    def look_up(self, hosts: Iterable[str]) -> None:
        """Begin to look up the names among the hosts that are due, unless an earlier call still
        does that. Forget all other names."""
        names = [host for host in hosts if host and address_of(host) is None]
        now_s = time.monotonic()
        with self._lock:
            self._known = {name: self._known.get(name, _KnownName()) for name in names}
            if self._is_busy:
                return
            before_s = now_s - LOOK_UP_EVERY_S
            due = [name for name, known in self._known.items() if known.looked_up_s <= before_s]
            self._is_busy = bool(due)
        if not due:
            return
        thread = threading.Thread(target=self._find, args=(due,), name="names", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed now: the next call tries again
            self._is_busy = False

    def _find(self, names: Collection[str]) -> None:
        try:
            for name in names:
                self._take(name, _resolve(name))
        finally:
            self._is_busy = False

    def _take(self, name: str, found: frozenset[Address] | None) -> None:
        with self._lock:
            if (before := self._known.get(name)) is not None:  # else it was forgotten meanwhile
                addresses = before.addresses if found is None else found
                self._known[name] = _KnownName(addresses, time.monotonic())


def _resolve(name: str) -> frozenset[Address] | None:
    """None: unknown, or no name."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return frozenset(plain(ipaddress.ip_address(each[4][0])) for each in answers)
    except (OSError, ValueError):
        return None
