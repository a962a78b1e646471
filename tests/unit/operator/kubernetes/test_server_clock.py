"""Test the time that the operator reads from answers of the API server.

The local clock is two hours ahead. After the first answer the time is the server's, and advances
with the monotonic clock. It does not jump back by the fraction that `Date` omits. It follows a
server whose clock is set. An answer without a valid `Date` changes nothing. The client reads the
`Date` of each answer.

Left out: an operator with such a clock (tests/cluster/test_operator_clock.py).
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_operator.kubernetes.api import KubernetesApi, ServerClock
from dlion_operator.kubernetes.client import Kind, ServerError

TRUE = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
AHEAD = timedelta(hours=2)
DATE = "Sat, 31 Jan 2026 12:00:00 GMT"


class Machine:
    """A machine whose clock is two hours ahead; `monotonic_s` advances with real time."""

    def __init__(self) -> None:
        self.monotonic_s = 500.0
        self.clock = ServerClock(
            monotonic_s=lambda: self.monotonic_s,
            local=lambda: TRUE + AHEAD + timedelta(seconds=self.monotonic_s - 500),
        )


def test_before_the_first_answer_the_time_is_this_machines() -> None:
    assert Machine().clock.now() == TRUE + AHEAD


def test_the_time_is_the_servers_and_advances() -> None:
    machine = Machine()
    machine.clock.update(DATE)
    assert machine.clock.now() == TRUE
    machine.monotonic_s += 90.25
    assert machine.clock.now() == TRUE + timedelta(seconds=90.25)


def test_answers_within_a_second_never_set_the_time_back() -> None:
    machine, before = Machine(), TRUE
    for tenths in range(100):
        machine.monotonic_s = 500.0 + tenths / 10
        second = (tenths + 7) // 10  # the server's fraction is 0.7 s at first
        machine.clock.update(f"Sat, 31 Jan 2026 12:00:{second:02} GMT")
        now = machine.clock.now()
        assert now >= before
        before = now
    assert abs(before - (TRUE + timedelta(seconds=10.6))) <= timedelta(seconds=1)


def test_a_server_whose_clock_is_set_is_followed() -> None:
    machine = Machine()
    machine.clock.update(DATE)
    machine.clock.update("Sat, 31 Jan 2026 09:00:00 GMT")
    assert machine.clock.now() - (TRUE - timedelta(hours=3)) <= timedelta(seconds=1)


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sat, 31 Jan 2026 12:00:00 -0000"])
def test_an_invalid_date_is_ignored(date: str | None) -> None:
    machine = Machine()
    machine.clock.update(date)
    assert machine.clock.now() == TRUE + AHEAD


@pytest.mark.parametrize("code", [200, 404, 500])
def test_the_time_of_every_answer_is_read(code: int) -> None:
    async def request(*_: Any, **__: Any) -> Any:
        async def read() -> bytes:
            return b"{}"

        return SimpleNamespace(status=code, headers={"Date": DATE}, read=read)

    async def update_params_for_auth(*_: Any) -> None: ...

    async def ask(machine: Machine) -> None:
        client: Any = SimpleNamespace(
            configuration=SimpleNamespace(host="https://api.example"),
            rest_client=SimpleNamespace(request=request),
            update_params_for_auth=update_params_for_auth,
        )
        api = KubernetesApi(client, lambda _code: None, clock=machine.clock)
        assert api.now() == TRUE + AHEAD
        try:
            await api.get(Kind.POD, "default", "p")
        except ServerError:
            assert code == 500
        assert api.now() == TRUE

    asyncio.run(ask(Machine()))
