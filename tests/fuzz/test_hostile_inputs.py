"""Tests of all parsers of foreign input: they accept hostile input or refuse it with the documented
error.

They do so within bounds of time and memory, and then serve honest input. The tests use 20,000
hostile frames and 29,000 other inputs; `make fuzz` uses fifty times as many, and `make slow` a
million in all. Only inputs that were
really altered count. A defect has the seed and the number that repeat it.

Left out: real sockets and processes (tests/local); certificates of other sites (test_trust of
tests/unit/core/links).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Hello
from dlion_core.links.framing import StreamReceiver
from dlion_core.links.state_transfer import StateAssembler
from hostile.attacking import Target, run
from hostile.targets import TARGETS, frames_for

SEED = 2


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_hostile_input_is_refused_or_harmless(
    target: Target, fuzz_count: int, tmp_path: Path
) -> None:
    count = target.count(fuzz_count)
    words = run(target, count, SEED, tmp_path)
    print(f"{target.name}: {dict(words)}")
    assert words.total() == count
    # Alterations without effect would prove nothing: all targets refuse more than half.
    assert words["refused"] > 0.4 * count


@pytest.mark.parametrize("total", [20_000, 1_000_000])
def test_frames_and_the_other_inputs_make_the_total(total: int) -> None:
    counts = [target.count(frames_for(total)) for target in TARGETS]
    assert total <= sum(counts) < 1.001 * total
    assert min(counts) >= 20


def test_an_undocumented_error_is_a_defect(tmp_path: Path) -> None:
    def attack(rng: object, folder: Path) -> str:
        raise KeyError(folder)

    with pytest.raises(KeyError) as caught:
        run(Target("broken", attack, 1.0), 1, 7, tmp_path)
    assert caught.value.__notes__ == ["hostile input: target 'broken', seed 7, number 1"]


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_refused_or_harmless(stream: list[bytes]) -> None:
    inbox, assembly = StreamReceiver(1000, incarnation=1), StateAssembler(1000)
    inbox.hello_received(Hello(epoch=1))
    for data in stream:
        for feed in (lambda d: inbox.feed(inbox.parse(d), 0.0), assembly.feed):
            try:
                feed(data)
            except ContractError:
                continue
