"""What was refused, as a sidecar counts and tells it.

Proves: counts are by port, side and reason, those of the trainer's exchange among them; the trainer
hears each thing once, so many at most; an answer that makes no sense counts as a message refused, a
peer that does not prove itself does not.
"""

from __future__ import annotations

from dlion_api.measurements import RefusalCount, StreamRefusals
from dlion_api.refusals import PeerRefusal
from dlion_worker.sidecar.refusals import MOST_WORDS, Refusals


def test_all_are_counted_and_each_thing_is_told_once() -> None:
    told: list[str] = []
    refusals = Refusals(lambda record: told.append(record.words))
    for words in ("a caller: x", "a caller: x", "a caller: y"):
        refusals.refused(PeerRefusal.BAD_CERTIFICATE, words, dialled=False)
    refusals.refused(PeerRefusal.UNPROVEN, "sidecar of worker 1: z", dialled=True)
    refusals.refused(PeerRefusal.MALFORMED, "sidecar of worker 1: nonsense", dialled=True)
    refusals.heard(StreamRefusals((RefusalCount("WrongRun", False, 7),)))
    assert refusals.counts() == {
        ("measuring", "served", "BadCertificate"): 3,
        ("measuring", "dialled", "Unproven"): 1,
        ("measuring", "dialled", "Malformed"): 1,
        ("exchange", "served", "WrongRun"): 7,
    }
    assert refusals.messages() == 4
    assert told == [
        "a caller: x", "a caller: y", "sidecar of worker 1: z", "sidecar of worker 1: nonsense",
    ]  # fmt: skip


def test_strangers_do_not_fill_the_memory() -> None:
    told: list[str] = []
    refusals = Refusals(lambda record: told.append(record.words))
    for number in range(2 * MOST_WORDS):
        refusals.refused(PeerRefusal.WRONG_RUN, f"{number} " + "x" * 9999, dialled=False)
    assert len(told) == MOST_WORDS
    assert max(map(len, told)) <= 500
    assert refusals.counts() == {("measuring", "served", "WrongRun"): 2 * MOST_WORDS}
