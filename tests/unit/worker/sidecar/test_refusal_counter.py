"""Tests of the counter of refusals in a sidecar.

Counts are by port, side and reason, and include those of the trainer's exchange. The trainer gets
each refusal once, up to a bound. An invalid answer counts as a refused message; a peer that does
not authenticate itself does not.
"""

from __future__ import annotations

from dlion_api.protocol.measurements import RefusalCount, StreamRefusals
from dlion_api.protocol.refusals import PeerRefusal
from dlion_worker.once_per_key import MAX_PER_KEY
from dlion_worker.sidecar.refusal_counter import RefusalCounter


def test_all_refusals_are_counted_and_each_is_reported_once() -> None:
    reported: list[str] = []
    refusals = RefusalCounter(lambda record: reported.append(record.words))
    for words in ("a caller: x", "a caller: x", "a caller: y"):
        refusals.refused(PeerRefusal.BAD_CERTIFICATE, words, dialled=False)
    refusals.refused(PeerRefusal.UNPROVEN, "sidecar of worker 1: z", dialled=True)
    refusals.refused(PeerRefusal.MALFORMED, "sidecar of worker 1: nonsense", dialled=True)
    refusals.set_stream_refusals(StreamRefusals((RefusalCount("WrongRun", False, 7),)))
    assert refusals.counts() == {
        ("measuring", "served", "BadCertificate"): 3,
        ("measuring", "dialled", "Unproven"): 1,
        ("measuring", "dialled", "Malformed"): 1,
        ("exchange", "served", "WrongRun"): 7,
    }
    assert refusals.messages() == 4
    assert reported == [
        "a caller: x", "a caller: y", "sidecar of worker 1: z", "sidecar of worker 1: nonsense",
    ]  # fmt: skip


def test_unknown_peers_fill_neither_memory_nor_the_quota_of_others() -> None:
    reported: list[str] = []
    refusals = RefusalCounter(lambda record: reported.append(record.words))
    many = 2 * MAX_PER_KEY
    for number in range(many):
        refusals.refused(PeerRefusal.WRONG_RUN, f"{number} " + "x" * 9999, dialled=False)
    assert len(reported) == MAX_PER_KEY
    assert max(map(len, reported)) <= 500
    assert refusals.counts() == {("measuring", "served", "WrongRun"): many}
    refusals.refused(PeerRefusal.WRONG_RUN, "sidecar of worker 1 refuses us", dialled=True)
    refusals.refused(PeerRefusal.BAD_CERTIFICATE, "a caller: of another site", dialled=False)
    assert reported[-2:] == ["sidecar of worker 1 refuses us", "a caller: of another site"]
