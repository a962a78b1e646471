"""Policy `ako`: partial gradient exchange. Every gradient value reaches every peer, one part at a
time.

The flat gradient is cut into p contiguous partitions of equal size. At its t-th step a worker sends
partition t mod p of the sum of its last p gradients to every peer. Receivers add it, under the
manifest's weighting. This worker applies its own gradient whole and at once. So a replica lacks
only the parts that its peers have yet to send, and each value counts exactly once everywhere. A
part is weighted by the local batch of the iteration that sends it.

A partition of that sum is what was added since the partition was last sent. So one sum is kept and
cleared where it is sent: D floats instead of p D. Each value still counts once if p changes, which
it may between two turns through all partitions. A partition is sent as its begin and all its
values. Codec rounding errors stay for the next turn.

p is `partitions`, or the smallest number whose partition fits the narrowest link's budget. The
largest budget of each link in the last turn is used, because a backlog is temporary.

Source: Watcharapichat et al., Ako: decentralised deep learning with partial gradient exchange, SoCC
2016, and its author's code for the rule. As recalled: what counts locally, equal contiguous
partitions, the search for p. Ours: the bound on p.
"""

from collections.abc import Mapping, Sequence

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, max_range_length, require_finite
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import Residual, outgoing
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, OutgoingPayloads
from dlion_core.policies.interface import Flat, PolicyMachine, Value
from dlion_core.policies.parameters import AkoParameters
from dlion_core.policies.state_values import ints_by_rank, vector_from_state

_ROOM_OF = "ako_room_bytes_of_"


def ako(context: PolicyContext, parameters: AkoParameters) -> PolicyMachine:
    selector = Ako(
        context.layout.size,
        context.coding,
        partitions=parameters.partitions,
        max_partitions=parameters.max_partitions,
    )
    return gradient_machine(context, selector)


class Ako(GradientSelector):
    """The current partition, and what each has accumulated since it was last sent."""

    def __init__(
        self, size: int, codec: AnyCoding, *, partitions: int, max_partitions: int
    ) -> None:
        self._size = size
        self._codec = codec
        self._fixed = min(partitions, size)
        self._max_partitions = min(max_partitions, size)
        self._gathered = Residual.zeros(size)
        self._partitions = 1
        self._turn = 0
        self._room_bytes: dict[Rank, int] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return the current partition, the same payload for all peers."""
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
        coded = self._gathered.send_range(self._partition(self._turn), self._codec)
        self._turn = (self._turn + 1) % self._partitions
        return outgoing(dict.fromkeys(peers, coded), GradientPart(gradient_D))

    def _smallest_that_fits(self) -> int:
        """p for the narrowest link; a link without a budget is unbounded. If a backlogged link
        accepted nothing for a whole turn, p is doubled."""
        if not self._room_bytes:
            return 1
        fits = max_range_length(min(self._room_bytes.values()), self._size, self._codec)
        return min(self._max_partitions, -(-self._size // fits) if fits else 2 * self._partitions)

    def _partition(self, turn: int) -> slice:
        """Partitions differ in size by at most one."""
        begin = turn * self._size // self._partitions
        return slice(begin, (turn + 1) * self._size // self._partitions)

    def forget(self, peer: Rank) -> None:
        self._room_bytes.pop(peer, None)

    def state(self) -> dict[str, Value]:
        return {
            "ako_gathered_D": self._gathered.value_D.copy(),
            "ako_partitions": self._partitions,
            "ako_turn": self._turn,
            **{f"{_ROOM_OF}{peer}": room for peer, room in self._room_bytes.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore what `state` returned; ignore other policies' checkpoints."""
        if "ako_gathered_D" not in state:
            return
        self._gathered.value_D = vector_from_state(state["ako_gathered_D"])
        self._partitions = int(state["ako_partitions"])
        self._turn = int(state["ako_turn"])
        self._room_bytes = ints_by_rank(state, _ROOM_OF)
