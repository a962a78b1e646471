"""Rules of `Spec`: which topologies of `spec.exchange` are possible with a job's workers.

`dlion_core.topology.topology` builds the graphs and relies on these rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.document import Rule
from dlion_api.spec.sites import WORKERS_CEL, workers_of

if TYPE_CHECKING:
    from dlion_api.spec.job import Spec

_DEGREE: Final = "self.exchange.degree"
_READS: Final = ("exchange.degree", "exchange.topology", "sites")


def _is(topology: str) -> str:
    """Return CEL that is true for other topologies and without a degree."""
    return f"self.exchange.topology != '{topology}' || !has({_DEGREE}) || "


def _degree(spec: Spec, topology: str) -> int | None:
    return spec.exchange.degree if spec.exchange.topology == topology else None


def _given(spec: Spec) -> str:
    count = workers_of(spec.sites)
    return f"{spec.exchange.degree}, with {count} worker{'s' * (count != 1)}"


def _allowed(spec: Spec) -> str:
    """Return the degrees that a random regular graph of these workers may have."""
    count = workers_of(spec.sites)
    if count <= 3:
        return str(count - 1)
    return f"{'an even number from ' * (count % 2)}2 to {count - 1}"


def _allowed_between_sides(spec: Spec) -> str:
    side = workers_of(spec.sites) // 2
    return f"2 to {side}" if side > 1 else "1"


TOPOLOGY_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        cel=f"self.exchange.topology == 'allToAll' || {WORKERS_CEL} >= 2",
        message="a topology other than allToAll needs at least two workers",
        holds=lambda it: it.exchange.topology == "allToAll" or workers_of(it.sites) >= 2,
        reads=("exchange.topology", "sites"),
        advice="Set topology: allToAll, or more workers.",
    ),
    Rule(
        cel=f"{_is('randomRegular')}{_DEGREE} < {WORKERS_CEL}",
        message="degree must be below the number of workers",
        holds=lambda it: (_degree(it, "randomRegular") or 0) < workers_of(it.sites),
        reads=_READS,
        given=_given,
        allowed=_allowed,
        advice="Use topology: allToAll to link each worker with all others.",
    ),
    Rule(
        cel=f"{_is('randomRegular')}({_DEGREE} * {WORKERS_CEL}) % 2 == 0",
        message="degree or the number of workers must be even",
        holds=lambda it: (_degree(it, "randomRegular") or 0) * workers_of(it.sites) % 2 == 0,
        reads=_READS,
        given=_given,
        allowed=_allowed,
        advice="Every link has two ends, so degree times workers is even.",
    ),
    Rule(
        cel=f"!has({_DEGREE}) || {_DEGREE} != 1 || {WORKERS_CEL} == 2",
        message="with degree 1 only two workers are connected",
        holds=lambda it: it.exchange.degree != 1 or workers_of(it.sites) == 2,
        reads=_READS,
        advice="Set a degree of 2 or more.",
    ),
    Rule(
        cel=f"{_is('bipartite')}2 * {_DEGREE} <= {WORKERS_CEL}",
        message="degree must not be above half the number of workers, the size of the other side",
        holds=lambda it: 2 * (_degree(it, "bipartite") or 0) <= workers_of(it.sites),
        reads=_READS,
        given=_given,
        allowed=_allowed_between_sides,
        advice="Leave degree out to link each worker with all of the other side.",
    ),
    Rule(
        cel=f"{_is('bipartite')}{WORKERS_CEL} % 2 == 0",
        message="bipartite with a degree needs an even number of workers",
        holds=lambda it: _degree(it, "bipartite") is None or workers_of(it.sites) % 2 == 0,
        reads=_READS,
        advice="Leave degree out, or add a worker.",
    ),
    Rule(
        cel="(self.exchange.topology == 'staged') == (self.exchange.policy == 'staged')",
        message="topology staged and policy staged belong together",
        holds=lambda it: (it.exchange.topology == "staged") == (it.exchange.policy == "staged"),
        reads=("exchange.topology", "exchange.policy"),
        advice="Set both, or neither.",
    ),
    Rule(
        cel="self.exchange.topology != 'staged' || self.trainer.encoder != ''",
        message="topology staged needs an encoder",
        holds=lambda it: it.exchange.topology != "staged" or bool(it.trainer.encoder),
        reads=("exchange.topology", "trainer.encoder"),
        advice="Name its .keras file in trainer.encoder.",
    ),
)
