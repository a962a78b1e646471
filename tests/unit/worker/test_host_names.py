"""Tests of host names and their addresses.

Names are looked up once in a while, also after a failure, and nothing waits for a slow resolver.

Left out: what the addresses are for (test_link_connections, test_connection_facts).
"""

from __future__ import annotations

import socket
import threading
import time
from ipaddress import ip_address

import pytest

from dlion_worker.host_names import LOOK_UP_EVERY_S, HostNames
from look_ups import look_ups_end


def looked_up(names: HostNames, *wanted: str) -> list[set[str]]:
    """The addresses of those names once the thread that looks them up has ended."""
    names.look_up(wanted)
    look_ups_end()
    return [{str(each) for each in names.addresses(name)} for name in wanted]


def test_names_are_looked_up_at_intervals_and_a_failure_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, list[object]] = {"a.example": ["10.0.0.7", "::ffff:10.0.0.8", "fd00::9"]}
    asked, now_s = [], [100.0]

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        asked.append(name)
        if name not in answers:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in answers[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    names, all_of_a = HostNames(), {"10.0.0.7", "10.0.0.8", "fd00::9"}
    assert looked_up(names, "a.example", "b.example") == [all_of_a, set()]
    assert looked_up(names, "a.example", "b.example") == [all_of_a, set()]
    assert asked == ["a.example", "b.example"]
    now_s[0] += LOOK_UP_EVERY_S
    answers = {"b.example": ["10.0.0.10"]}
    assert looked_up(names, "a.example", "b.example") == [all_of_a, {"10.0.0.10"}]
    assert looked_up(names, "b.example") == [{"10.0.0.10"}]
    assert names.addresses("a.example") == set(), "it is no peer's any longer"


def test_a_name_that_no_resolver_accepts_is_no_error() -> None:
    assert looked_up(HostNames(), "x" * 70, "..", "a\0b") == [set(), set(), set()]


def test_nothing_waits_for_a_slow_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second thread is started meanwhile. What is found until then is known, and names that are
    no peer's any longer are forgotten."""
    asked, is_slow, is_over = [], threading.Event(), threading.Event()

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        asked.append(name)
        if name == "slow.example":
            is_slow.set()
            is_over.wait(10)
        return [(0, 0, 0, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    names = HostNames()
    try:
        names.look_up(["a.example", "slow.example"])
        assert is_slow.wait(10)
        assert names.addresses("a.example") == {ip_address("10.0.0.7")}
        names.look_up(["b.example"])
        assert [names.addresses(name) for name in ("a.example", "b.example")] == [frozenset()] * 2
    finally:
        is_over.set()
    looked_up(names, "b.example")  # the first thread may have to end before
    assert names.addresses("slow.example") == frozenset(), "it was forgotten meanwhile"
    assert looked_up(names, "b.example") == [{"10.0.0.7"}]
    assert asked == ["a.example", "slow.example", "b.example"]


def test_names_are_looked_up_again_after_no_thread_could_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = HostNames()

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        names.look_up(["localhost"])
    (found,) = looked_up(names, "localhost")
    assert "127.0.0.1" in found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_names_are_looked_up_again_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = HostNames()

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(socket, "getaddrinfo", fails)
        assert looked_up(names, "localhost") == [set()]
    (found,) = looked_up(names, "localhost")
    assert "127.0.0.1" in found


def test_an_address_is_its_own_and_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: asked.append(name) or [])
    names, addresses = HostNames(), ("10.0.0.7", "::ffff:10.0.0.7", "fd00::9")
    assert looked_up(names, *addresses, "") == [{"10.0.0.7"}, {"10.0.0.7"}, {"fd00::9"}, set()]
    assert asked == []
