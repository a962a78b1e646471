"""Policy `ako`: partial gradient exchange. Every gradient value reaches every peer, a part a time.

The flat gradient is cut into p contiguous partitions of equal size. At its t-th step a worker
sends partition t mod p of the sum of its last p gradients to every peer; receivers add what comes,
under the manifest's weighting. Here counts the worker's own gradient, whole and at once: a replica
then lacks only what its peers have still to send, the last p - 1 gradients' parts, and each value
counts exactly once everywhere. A part counts by the local batch of the iteration that sends it.

A partition of the ring's sum is what has been added since that partition was last sent, so that
sum alone is kept, cleared where it was sent: D floats instead of p D, and still exactly once where
p changes, which it may do between two turns through all partitions. A
partition travels as where it begins and all its values; what a codec rounds off stays for the next
turn.

p: `partitions`, or the smallest whose partition fits the narrowest link's budget. That is judged
by the most that each link had room for in the last turn: a backlog passes.

Source: Watcharapichat et al., Ako: decentralised deep learning with partial gradient exchange, SoCC
2016, and its author's code for the rule; what counts locally, equal contiguous partitions, and the
search for p as recalled; the bound on p is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, GradientPart, range_that_fits, require_finite
from dlion_worker.policies.building import Context, gradient_machine
from dlion_worker.policies.entries import Residual
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_worker.policies.interface import Flat, Machine, Value
    from dlion_worker.policies.parameters import AkoParameters

_ROOM_OF = "ako_room_bytes_of_"


def ako(context: Context, parameters: AkoParameters) -> Machine:
    """One partition of the accumulated gradient at a time, to every peer."""
    sending = Ako(
        context.layout.size,
        context.coding,
        partitions=parameters.partitions,
        most_partitions=parameters.most_partitions,
    )
    return gradient_machine(context, sending)


class Ako:
    """Which partition's turn it is, and what each has gathered since its last."""

    combines = True

    def __init__(
        self, size: int, codec: AnyCoding, *, partitions: int, most_partitions: int
    ) -> None:
        self._size = size
        self._codec = codec
        self._fixed = min(partitions, size)
        self._most = min(most_partitions, size)
        self._gathered = Residual(size)
        self._partitions = 1
        self._turn = 0
        self._room_bytes: dict[Rank, int] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """This turn's partition, the same for all.

        Raises:
            ValueError: an entry is not finite.
        """
        require_finite(gradient_D, "gradient")
        for peer in peers:
            if (room := budget_bytes.get(peer)) is not None:
                self._room_bytes[peer] = max(room, self._room_bytes.get(peer, 0))
            else:
                self._room_bytes.pop(peer, None)
        if self._turn == 0:
            self._partitions = self._fixed or self._smallest_that_fits()
            self._room_bytes.clear()
        self._gathered.value_D += gradient_D
        coded = self._gathered.send_run(self._partition(self._turn), self._codec)
        self._turn = (self._turn + 1) % self._partitions
        payloads = {} if coded.payload is None else dict.fromkeys(peers, coded.payload)
        return Outgoing(payloads, GradientPart(gradient_D))

    def _smallest_that_fits(self) -> int:
        """p for the narrowest link; a link without a budget takes everything.

        Where a link took nothing in a whole turn, through backlog, twice as many as before.
        """
        if not self._room_bytes:
            return 1
        fits = range_that_fits(min(self._room_bytes.values()), self._size, self._codec)
        return min(self._most, -(-self._size // fits) if fits else 2 * self._partitions)

    def _partition(self, turn: int) -> slice:
        """Sizes differ by one at most.

        >>> from dlion_worker.codecs import ValueCodec
        >>> policy = Ako(10, ValueCodec.FLOAT32, partitions=3, most_partitions=3)
        >>> policy._partitions = 3
        >>> [(part.start, part.stop) for part in map(policy._partition, range(3))]
        [(0, 3), (3, 6), (6, 10)]
        """
        begin = turn * self._size // self._partitions
        return slice(begin, (turn + 1) * self._size // self._partitions)

    def forget(self, peer: Rank) -> None:
        """Its link no longer bounds p."""
        self._room_bytes.pop(peer, None)

    def state(self) -> dict[str, Value]:
        """What has been gathered, whose turn it is, and what the links had room for."""
        return {
            "ako_gathered_D": self._gathered.value_D.copy(),
            "ako_partitions": self._partitions,
            "ako_turn": self._turn,
            **{f"{_ROOM_OF}{peer}": room for peer, room in self._room_bytes.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; of a checkpoint of another policy, nothing."""
        if "ako_gathered_D" not in state:
            return
        self._gathered.value_D = np.array(state["ako_gathered_D"], np.float32)
        self._partitions = int(state["ako_partitions"])
        self._turn = int(state["ako_turn"])
        self._room_bytes = {
            Rank(int(name.removeprefix(_ROOM_OF))): int(room)
            for name, room in state.items()
            if name.startswith(_ROOM_OF)
        }
