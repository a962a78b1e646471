"""Rules of `Spec`: with which jobs `spec.exchange.robustness` may change how contributions count.

`dlion_core.policies.robust` has the methods. They need the contributions of all workers to one
update at once, which only policies with a barrier have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.document import Rule
from dlion_api.spec.sites import WORKERS_CEL, workers_of

if TYPE_CHECKING:
    from dlion_api.spec.job import Spec

CHANGING: Final = ("clip", "trimmed", "krum")
"""Values that change how contributions count."""

IN_ROUNDS: Final = ("adaptive", "sparseloco")
"""Policies that wait for the contributions of all, whatever the synchronization."""

WITHOUT: Final = (
    "adacomp", "adpsgd", "ako", "async", "d2", "eventgrad", "fedat", "gaia", "halos",
    "hierarchical", "hop", "localsgd", "none", "quorum-diloco", "staged", "twostep",
)  # fmt: skip
"""Policies that do not combine gradients or changes of all workers at once, or (`ako`) not the same
entries of each. An installed policy may."""

MIN_WORKERS: Final = {"trimmed": 3, "krum": 4}
"""One value more than is left out at either end; one neighbour to be compared with."""

_CHANGES: Final = f"self.exchange.robustness in {list(CHANGING)}"


def _changes(spec: Spec) -> bool:
    return spec.exchange.robustness in CHANGING


def _waits_for_all(spec: Spec) -> bool:
    is_round = spec.exchange.policy in IN_ROUNDS
    return is_round or spec.synchronization.mode == "synchronous"


def _given(spec: Spec) -> str:
    return f"{spec.exchange.robustness}, with {workers_of(spec.sites)} workers"


ROBUSTNESS_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        cel="self.exchange.quarantine == 'off' || self.exchange.robustness != 'off'",
        message="quarantine majority needs the warnings that robustness off does not give",
        holds=lambda it: it.exchange.quarantine == "off" or it.exchange.robustness != "off",
        reads=("exchange.quarantine", "exchange.robustness"),
        advice="Set exchange.robustness: detect, or quarantine: off.",
    ),
    Rule(
        cel=f"!({_CHANGES}) || !(self.exchange.policy in {list(WITHOUT)})",
        message="robustness clip, trimmed and krum need a policy that combines the contributions of"
        " all workers at once",
        holds=lambda it: not _changes(it) or it.exchange.policy not in WITHOUT,
        reads=("exchange.robustness", "exchange.policy"),
        given=lambda it: f"{it.exchange.robustness}, with policy {it.exchange.policy}",
        allowed=lambda _: "off, detect",
        advice="Set exchange.policy: adaptive, or another of those that docs/robustness.md lists.",
    ),
    Rule(
        cel=f"!({_CHANGES}) || self.exchange.policy in {list(IN_ROUNDS)} ||"
        " self.synchronization.mode == 'synchronous'",
        message="robustness clip, trimmed and krum need mode synchronous with this policy, since"
        " late contributions are added without them",
        holds=lambda it: not _changes(it) or _waits_for_all(it),
        reads=("exchange.robustness", "exchange.policy", "synchronization.mode"),
        advice="Set synchronization.mode: synchronous, or exchange.policy: adaptive.",
    ),
    Rule(
        cel=f"!({_CHANGES}) || self.exchange.propagation != 'selective'",
        message="robustness clip, trimmed and krum need propagation all: else a peer gets the sum"
        " of several gradients at once",
        holds=lambda it: not _changes(it) or it.exchange.propagation != "selective",
        reads=("exchange.robustness", "exchange.propagation"),
        advice="Set propagation: all, or robustness: detect.",
    ),
    Rule(
        cel="!(self.exchange.robustness in ['trimmed', 'krum']) ||"
        " self.exchange.topology == 'allToAll'",
        message="robustness trimmed and krum need topology allToAll: neighbours are too few",
        holds=lambda it: (
            it.exchange.robustness not in MIN_WORKERS or it.exchange.topology == "allToAll"
        ),
        reads=("exchange.robustness", "exchange.topology"),
        advice="Set topology: allToAll, or robustness: clip.",
    ),
    Rule(
        cel=f"{WORKERS_CEL} >= (self.exchange.robustness == 'krum' ? {MIN_WORKERS['krum']} :"
        f" (self.exchange.robustness == 'trimmed' ? {MIN_WORKERS['trimmed']} : 1))",
        message="too few workers for this robustness",
        holds=lambda it: workers_of(it.sites) >= MIN_WORKERS.get(it.exchange.robustness, 1),
        reads=("exchange.robustness", "sites"),
        given=_given,
        allowed=lambda it: f"{MIN_WORKERS[it.exchange.robustness]} workers or more",
        advice="Set robustness: clip, or add workers.",
    ),
)
