"""A worker that asks for another side's weights: whom it waits for, and what it was meanwhile.

Called by `folding`. Weights that arrive are of a moment ago. They are set against what this
worker's own were when it asked, or in lock step after the same iteration, so that what both have
taken since counts once.

Source: the project's definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlion_api.names import Rank
    from dlion_worker.policies.held import Held
    from dlion_worker.policies.interface import Flat, Message

ANSWER_STEPS = 3
"""Who has not said after so many steps what it holds is not waited for: in lock step, where a step
takes as long as messages do."""

LOOSE_ANSWER_STEPS = 30
"""The same where steps wait for no message."""

MOST_MOMENTS = 3
"""Of which these weights are kept: in lock step an answer is of the iteration after which it was
asked for, or of the next."""


@dataclass
class Inquiry:
    """What peers hold has been asked of them."""

    awaited: set[Rank]
    """Who has not said yet."""
    steps_left: int

    def stepped(self) -> bool:
        """One step more; whether it was the last that somebody is waited for."""
        self.steps_left -= 1
        if not self.awaited or self.steps_left > 0:
            return False
        self.awaited.clear()
        return True


@dataclass(frozen=True)
class Said:
    """What a peer has said that its weights hold, set against what these held when it came: what
    is counted later of gradients on a link that stands again is lacking to neither."""

    held: Held
    missed: int
    """Samples that it holds and that were lacking here."""
    lost: int
    """Samples that were held here and that it lacks."""


@dataclass(frozen=True)
class Moment:
    """What a worker held, and where its weights would have come to rest."""

    held: Held
    resting_D: Flat


@dataclass
class Asked:
    """A request for weights that is under way."""

    peer: Rank
    early: Message | None = None
    """An answer after an update that is not made here yet."""
    moments: dict[int, Moment] = field(default_factory=dict)
    """By the last iteration whose update they hold, from when it was asked on."""

    def wants(self, iteration: int, most: int) -> bool:
        """Whether what these weights are after that iteration's update is to be kept."""
        return iteration not in self.moments and len(self.moments) < most

    def after(self, iteration: int) -> Moment:
        """That iteration's, or the nearest that is kept."""
        return self.moments[min(self.moments, key=lambda one: (abs(one - iteration), one))]
