"""Hostile frames are refused or harmless, and so is anything that hypothesis thinks of.

20,000 in the tests, a million by `make fuzz`; both repeatable from the seed.
Left out: what is inside payloads (the codecs' own tests).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Hello
from dlion_worker.exchange.framing import Inbox
from dlion_worker.exchange.transfer import Assembly

_spec = importlib.util.spec_from_file_location("frames", Path(__file__).parent / "frames.py")
assert _spec is not None
assert _spec.loader is not None
frames = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(frames)


def test_hostile_frames_are_refused_or_harmless(fuzz_count: int) -> None:
    tally = frames.attack(fuzz_count, seed=2)
    assert tally["in all"] >= fuzz_count
    for what in ("frames", "acknowledgements", "state chunks"):
        assert tally[f"{what} refused"] > fuzz_count / 20


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_at_all_are_refused_or_harmless(stream: list[bytes]) -> None:
    inbox, assembly = Inbox(1000, incarnation=1), Assembly(1000)
    inbox.greeted(Hello(epoch=1))
    for data in stream:
        for feed in (lambda d: inbox.feed(inbox.parse(d), 0.0), assembly.feed):
            try:
                feed(data)
            except ContractError:
                continue
