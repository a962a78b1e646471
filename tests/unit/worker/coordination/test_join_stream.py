"""Tests of a join stream: it closes although gRPC does not end its cancelled call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from dlion_worker.coordination import join_stream
from dlion_worker.coordination.join_stream import JoinStream


class Endless:
    """A stub, a call and an announcement: no update arrives, and cancelling has no effect."""

    def __init__(self) -> None:
        self.joined, self.over, self.cancelled = threading.Event(), threading.Event(), False

    def request(self, _known_version: int) -> None:
        return None

    def Join(self, _request: None) -> Endless:  # noqa: N802 - gRPC's name
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def __iter__(self) -> Iterator[None]:
        self.joined.set()
        self.over.wait(60)
        return iter(())


def test_close_does_not_wait_for_a_call_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_stream, "CLOSE_TIMEOUT_S", 0.05)
    call = Endless()
    stream = JoinStream(cast("Any", call), cast("Any", call), lambda: 0, print, print)
    stream.start()
    assert call.joined.wait(10)
    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join(10)
    try:
        assert (closing.is_alive(), call.cancelled) == (False, True)
    finally:
        call.over.set()
