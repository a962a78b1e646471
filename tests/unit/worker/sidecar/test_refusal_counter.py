"""What was refused, as a sidecar counts and tells it.

Proves: counts are by port, side and reason, those of the trainer's exchange among them; the trainer
hears each thing once, so many at most; an answer that makes no sense counts as a message refused, a
peer that does not prove itself does not.
"""

from __future__ import annotations

from dlion_api.protocol.measurements import RefusalCount, StreamRefusals
from dlion_api.protocol.refusals import PeerRefusal
from dlion_worker.once_per_key import MAX_PER_KEY
from dlion_worker.sidecar.refusal_counter import RefusalCounter


def test_all_are_counted_and_each_thing_is_told_once() -> None:
    told: list[str] = []
    refusals = RefusalCounter(lambda record: told.append(record.words))
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
    assert told == [
        "a caller: x", "a caller: y", "sidecar of worker 1: z", "sidecar of worker 1: nonsense",
    ]  # fmt: skip


def test_strangers_fill_neither_the_memory_nor_the_room_of_others() -> None:
    told: list[str] = []
    refusals = RefusalCounter(lambda record: told.append(record.words))
    many = 2 * MAX_PER_KEY
    for number in range(many):
        refusals.refused(PeerRefusal.WRONG_RUN, f"{number} " + "x" * 9999, dialled=False)
    assert len(told) == MAX_PER_KEY
    assert max(map(len, told)) <= 500
    assert refusals.counts() == {("measuring", "served", "WrongRun"): many}
    refusals.refused(PeerRefusal.WRONG_RUN, "sidecar of worker 1 refuses us", dialled=True)
    refusals.refused(PeerRefusal.BAD_CERTIFICATE, "a caller: of another site", dialled=False)
    assert told[-2:] == ["sidecar of worker 1 refuses us", "a caller: of another site"]
