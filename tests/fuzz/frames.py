"""Hostile bytes for everything that the exchange parses; `python tests/fuzz/frames.py`.

Proves that whatever arrives is either taken or refused with `ContractError`: no other exception,
no payload that was not sent, no memory beyond the limits. Valid streams are made by the real
sender and then bent: bits flipped, bytes cut, fields set to the values that break things, frames
lost, doubled, swapped. Repeatable from the seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from google.protobuf.message import DecodeError

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello, StateChunk
from dlion_worker.exchange.client import _acknowledgement
from dlion_worker.exchange.events import StateSnapshot
from dlion_worker.exchange.framing import Inbox
from dlion_worker.exchange.transfer import Assembly, cut
from dlion_worker.exchange.window import Outbox, QueueRule
from dlion_worker.policies.interface import Message, MessageKind

LIMIT = 20_000
NUMBERS = (0, 1, 2, 3, 127, 128, 255, 2**15, LIMIT, LIMIT + 1, 2**31, 2**32 - 1)
LARGE = (*NUMBERS, 2**53, 2**53 + 1, 2**63, 2**64 - 1)


def valid_stream(chance: random.Random) -> tuple[list[bytes], set[bytes]]:
    """Frames of a few messages as the real sender makes them, and the payloads in them."""
    outbox = Outbox(QueueRule.KEEP, 100)
    frames = [Frame(hello=Hello(epoch=outbox.reset())).SerializeToString()]
    outbox.set_budget(chance.choice((512, 4096, 40_000)))
    payloads = {b""}
    for iteration in range(chance.randint(1, 3)):
        kind = chance.choice(list(MessageKind))
        size = chance.choice((1, 7, 500, 5000))
        if kind in (MessageKind.PROGRESS, MessageKind.WEIGHTS_REQUEST):
            size = 0
        elif kind in (MessageKind.LOSS, MessageKind.STOP):
            size = 8
        payload = chance.randbytes(size)
        payloads.add(payload)
        outbox.push(Message(kind, iteration, payload=payload))
    while True:
        frame = outbox.next_frame(0.0)
        if frame is None:
            break
        frames.append(frame)
    return frames, payloads


def bend_bytes(chance: random.Random, data: bytes) -> bytes:
    """The bytes, with something wrong."""
    broken = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        what = chance.randrange(4)
        at = chance.randrange(len(broken) + 1)
        if what == 0 and broken:
            broken[at % len(broken)] ^= 1 << chance.randrange(8)
        elif what == 1:
            del broken[at:]
        elif what == 2:
            broken[at:at] = chance.randbytes(chance.choice((1, 3, 40)))
        elif broken:
            broken[at % len(broken)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(broken)


def bend_fields(chance: random.Random, data: bytes) -> bytes:
    """The frame, with a field set to a value at some edge."""
    frame = Frame.FromString(data)
    field = chance.choice(
        ("message", "offset", "checksum", "payload", "kind", "number", "total", "iteration",
         "no header", "hello", "epoch")
    )  # fmt: skip
    edits: dict[str, Callable[[], object]] = {
        "message": lambda: setattr(frame, "message", chance.choice(LARGE)),
        "offset": lambda: setattr(frame, "offset", chance.choice(LARGE)),
        "checksum": lambda: setattr(frame, "checksum", chance.choice(NUMBERS)),
        "payload": lambda: setattr(frame, "payload", chance.randbytes(chance.choice((0, 1, 999)))),
        "kind": lambda: setattr(frame.header, "kind", chance.randrange(9)),
        "number": lambda: setattr(frame.header, "message", chance.choice(LARGE)),
        "total": lambda: setattr(frame.header, "total_bytes", chance.choice(LARGE)),
        "iteration": lambda: setattr(frame.header, "iteration", chance.choice(LARGE)),
        "no header": lambda: frame.ClearField("header"),
        "hello": lambda: setattr(frame.hello, "rank", chance.choice(NUMBERS)),
        "epoch": lambda: setattr(frame.hello, "epoch", chance.choice(LARGE)),
    }
    edits[field]()
    return frame.SerializeToString()


def bend_order(chance: random.Random, frames: list[bytes]) -> None:
    """Loses, doubles or moves a frame."""
    at = chance.randrange(len(frames))
    what = chance.randrange(3)
    if what == 0:
        del frames[at]
    elif what == 1:
        frames.insert(chance.randrange(len(frames) + 1), frames[at])
    else:
        frames.insert(chance.randrange(len(frames)), frames.pop(at))


def hostile_stream(chance: random.Random) -> tuple[list[bytes], set[bytes]]:
    """A stream with something wrong (or, now and then, nothing)."""
    frames, payloads = valid_stream(chance)
    what = chance.randrange(4)
    at = chance.randrange(len(frames))
    if what == 0:
        frames[at] = bend_bytes(chance, frames[at])
    elif what == 1:
        frames[at] = bend_fields(chance, frames[at])
    elif what == 2:
        bend_order(chance, frames)
    else:
        frames[at] = chance.randbytes(chance.choice((0, 1, 30, 3000)))
    return frames, payloads


def attack_inbox(chance: random.Random, tally: Counter[str]) -> int:
    """One hostile stream against the receiver; how many frames it took."""
    frames, payloads = hostile_stream(chance)
    inbox = Inbox(LIMIT, incarnation=1)
    for count, data in enumerate(frames, 1):
        try:
            frame = inbox.parse(data)
            if frame.HasField("hello"):
                inbox.greeted(frame.hello)
                continue
            message = inbox.feed(frame, 0.0)
        except ContractError:
            tally["frames refused"] += 1
            return count
        if message is not None:
            tally["messages taken"] += 1
            # A field may change a message's meaning; a payload cannot become another unseen,
            # but for one whose checksum was changed with it: bytes of a frame of its own.
            if bytes(message.payload) not in payloads:
                tally["payloads of the attacker's own"] += 1
                assert message.size_bytes <= LIMIT
    return len(frames)


def attack_outbox(chance: random.Random, tally: Counter[str]) -> int:
    """One hostile acknowledgement against the sender."""
    outbox = Outbox(QueueRule.KEEP, 100)
    outbox.reset()
    outbox.push(Message(MessageKind.GRADIENT, 1, payload=bytes(3000)))
    outbox.next_frame(0.0)
    honest = Acknowledgement(epoch=1, incarnation=1, frames=1, stream_bytes=3000, busy_bytes=9)
    if chance.random() < 0.5:
        name = chance.choice([f.name for f in honest.DESCRIPTOR.fields])
        setattr(honest, name, chance.choice(LARGE))
        data = honest.SerializeToString()
    else:
        data = bend_bytes(chance, honest.SerializeToString())
    try:
        outbox.acknowledge(_acknowledgement(data), 1.0)
        tally["acknowledgements taken"] += 1
    except ContractError:
        tally["acknowledgements refused"] += 1
    assert 0 <= outbox.unacknowledged_bytes <= 3000
    return 1


def attack_assembly(chance: random.Random, tally: Counter[str]) -> int:
    """One hostile chunk of state."""
    data = next(cut(StateSnapshot(1, 1, chance.randbytes(chance.choice((1, 300))))))
    if chance.random() < 0.5:
        chunk = StateChunk.FromString(data)
        name = chance.choice(("total_bytes", "offset", "iteration", "samples"))
        setattr(chunk, name, chance.choice(LARGE))
        data = chunk.SerializeToString()
    else:
        data = bend_bytes(chance, data)
    try:
        Assembly(LIMIT).feed(data)
        tally["state chunks taken"] += 1
    except ContractError:
        tally["state chunks refused"] += 1
    return 1


def attack(count: int, seed: int) -> Counter[str]:
    """So many hostile frames, acknowledgements and chunks; what became of them.

    Raises:
        Whatever the parsers raise besides `ContractError`: that is the defect looked for.
    """
    tally: Counter[str] = Counter()
    done = 0
    while done < count:
        chance = random.Random(f"{seed}/{done}")
        attacker = chance.choice((attack_inbox, attack_inbox, attack_outbox, attack_assembly))
        try:
            done += attacker(chance, tally)
        except (AssertionError, DecodeError, ValueError, KeyError, MemoryError, OverflowError):
            sys.stderr.write(f"defect at seed {seed}/{done}\n")
            raise
    tally["in all"] = done
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    tally = attack(arguments.count, arguments.seed)
    for what, number in sorted(tally.items()):
        sys.stdout.write(f"{number:>10,}  {what}\n")
    sys.stdout.write(f"{time.monotonic() - began_s:10.1f}  seconds, seed {arguments.seed}\n")


if __name__ == "__main__":
    main()
