"""What holds a run up most, in one sentence, and what to do about it. Pure.

Used for `summary.json`, the report and, with the figures of a job's status, by `dlion describe`.
The rules, the largest share of the time first; below its threshold nothing is named:

- waiting: for a worker that computes slower than at the start, for one whose steps take the
  longest, for a link, or for nothing in particular
- a phase of the exchange, or what passes outside of steps
- a worker that computes much slower than at the start although none waits for it
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from dlion_results.summary.awaited_link import (
    CLUSTER_LINKS,
    LinkMedium,
    LinkUse,
    late_link_advice,
    link_between,
    link_medium,
    slow_link_advice,
)

MIN_WAIT: Final = 0.25
"""Share of the time from which on waiting is named. Synchronous steps of equal workers differ by
chance, so some waiting is usual."""
MIN_PHASE: Final = 0.2
MIN_OTHER: Final = 0.3
MIN_LOST: Final = 0.05
"""Minimum share of time lost by a worker that has become slower and that no other awaits."""
STANDS_OUT: Final = 1.5
"""Times its equal part of all waiting, from which on a worker is named."""
HARDLY_WAITS: Final = 0.15
"""Waiting over computing time of a worker that holds others up by its own steps."""
IS_SLOWED: Final = 0.6
"""Pace over that at the start."""
IS_SMALLER: Final = 0.75
"""Batch over that at the start, below which it may be why the pace has fallen: each step has a
fixed cost."""


class CulpritKind(StrEnum):
    """Stable names, for programs."""

    SLOWED_WORKER = "SlowedWorker"
    SLOW_WORKER = "SlowWorker"
    SLOW_LINK = "SlowLink"
    WAITING = "Waiting"
    SELECT = "Select"
    ENCODE = "Encode"
    SEND = "Send"
    DECODE = "Decode"
    APPLY = "Apply"
    OTHER = "Other"


_PHASES: Final[Mapping[str, tuple[CulpritKind, str, str]]] = {
    "select": (
        CulpritKind.SELECT, "selecting what to send",
        "Exchange less often (exchange.policy: adaptive) or with fewer peers (exchange.topology)",
    ),
    "encode": (
        CulpritKind.ENCODE, "encoding",
        "Choose a cheaper exchange.codec, such as float16, or fewer peers (exchange.topology)",
    ),
    "send": (
        CulpritKind.SEND, "queueing messages",
        "Give the worker another core, or fewer peers (exchange.topology)",
    ),
    "decode": (
        CulpritKind.DECODE, "decoding and adding up what peers sent",
        "Exchange less often (exchange.policy: adaptive) or with fewer peers (exchange.topology)",
    ),
    "apply": (
        CulpritKind.APPLY, "changing the weights",
        "Update less often: raise batching.globalBatchSize, or choose a simpler optimizer",
    ),
}  # fmt: skip
_SLOWED_ADVICE: Final = (
    "See what else runs on its machine; in a cluster `dlion top` shows quota, throttling, "
    "temperature"
)
_SMALLER_ADVICE: Final = (
    "Smaller batches cost more per sample: raise batching.globalBatchSize, or use fewer workers. "
    "If the batch has followed a slower machine: "
)
_SLOW_ADVICE: Final = (
    "Let batches follow the capacities (batching.policy), give it more cores, or relax "
    "synchronization.mode"
)
_LINK_ADVICE: Final = "Send less (exchange.policy: adaptive, a smaller exchange.codec), or "
_LATE_ADVICE: Final = (
    "Synchronise less often (exchange.policy: adaptive) or more loosely (synchronization.mode); "
)
_OTHER_ADVICE: Final = (
    "Look for restarts and pauses among the events; evaluate and save less often "
    "(trainer.evaluation.everySamples, checkpoint.everySeconds)"
)
_FEWER_ADVICE: Final = "Use fewer workers, or larger batches (batching.globalBatchSize)"
_ADAPTIVE_ADVICE: Final[Mapping[str, str]] = {
    _LATE_ADVICE: "Rounds follow the links already: ",
    _LINK_ADVICE: "It sends what the link carries already: ",
    _SLOW_ADVICE: "Let batches follow the capacities (batching.policy), or give it more cores",
    _PHASES["select"][2]: _FEWER_ADVICE,
    _PHASES["decode"][2]: _FEWER_ADVICE,
}
"""Advice for runs of `adaptive`, which have followed the usual advice or cannot."""


@dataclass(frozen=True)
class Culprit:
    """What holds a run up most. `fraction`: its share of all workers' time."""

    kind: CulpritKind
    fraction: float
    sentence: str
    """The sentence without a full stop; names in it are as given, not escaped."""
    advice: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": str(self.kind)}


@dataclass(frozen=True)
class AwaitedPeer:
    """A worker, as those see it that wait for it."""

    name: str
    fraction: float
    """Fraction of all waiting."""
    waits: float | None
    """Its own waiting over its computing time; None: unknown."""
    link: LinkUse | None = None
    site_link: LinkUse | None = None
    """The slowest link of its site, where the worker that waits most for it is unknown."""

    @property
    def way(self) -> str:
        """How its messages come, as a part of a sentence; empty: unknown."""
        if self.link is not None:
            return f" over link {self.link.figures}"
        if self.site_link is not None:
            return f"; slowest link of its site: {self.site_link.figures}"
        return ""


@dataclass(frozen=True)
class RunUse:
    """The figures that a culprit is derived from."""

    fractions: Mapping[str, float]
    """Shares of all workers' time: `wait`, the phases, `other`; unknown ones are absent."""
    worker_count: int
    awaited: AwaitedPeer | None = None
    """The one that was waited for most."""
    pace_changes: Mapping[str, float] | None = None
    """Pace of computing over that at the start, by worker."""
    batch_changes: Mapping[str, float] | None = None
    """Batch size over that at the start, by worker."""
    policy: str = ""
    """Policy of the exchange."""
    links: LinkMedium = CLUSTER_LINKS


def find_culprit(use: RunUse) -> Culprit | None:
    """The largest of what costs more than is usual; None if nothing does.

    >>> find_culprit(RunUse({"wait": 0.1, "select": 0.02, "other": 0.05}, 4)) is None
    True
    >>> find_culprit(RunUse({"wait": 0.1, "select": 0.31}, 4)).sentence
    '31 % of the time goes to selecting what to send'
    """
    culprit = max(_candidates(use), key=lambda each: each.fraction, default=None)
    if culprit is None:
        return None
    advice = culprit.advice
    if use.policy == "adaptive":
        advice = _ADAPTIVE_ADVICE.get(advice, advice)
    link = use.awaited.link if use.awaited is not None else None
    if culprit.kind is CulpritKind.WAITING:
        advice += late_link_advice(use.links, link)
    elif culprit.kind is CulpritKind.SLOW_LINK:
        advice += slow_link_advice(use.links, link)
    return replace(culprit, advice=advice)


def _candidates(use: RunUse) -> Iterator[Culprit]:
    waiting = use.fractions.get("wait", 0.0)
    if waiting >= MIN_WAIT:
        yield _of_waiting(use, waiting)
    for phase, (kind, text, advice) in _PHASES.items():
        if (share := use.fractions.get(phase, 0.0)) >= MIN_PHASE:
            yield Culprit(kind, share, f"{_percent(share)} of the time goes to {text}", advice)
    if (share := use.fractions.get("other", 0.0)) >= MIN_OTHER:
        text = f"{_percent(share)} of the time passes neither in gradients nor in the exchange"
        yield Culprit(CulpritKind.OTHER, share, text, _OTHER_ADVICE)
    changes = use.pace_changes or {}
    if changes:
        name = min(changes, key=lambda each: changes[each])
        lost = use.fractions.get("compute", 1.0) * (1 - changes[name]) / use.worker_count
        if changes[name] <= IS_SLOWED and lost >= MIN_LOST:
            text, advice = _slowed(use, name, name)
            yield Culprit(CulpritKind.SLOWED_WORKER, lost, text, advice)


def _of_waiting(use: RunUse, waiting: float) -> Culprit:
    share, peer = _percent(waiting), use.awaited
    if peer is None:
        text = f"{share} of the time waits for peers' messages"
        return Culprit(CulpritKind.WAITING, waiting, text, _LATE_ADVICE)
    stands_out = peer.fraction > STANDS_OUT / use.worker_count
    change = (use.pace_changes or {}).get(peer.name)
    if stands_out and change is not None and change <= IS_SLOWED:
        slowed, advice = _slowed(use, peer.name, "it")
        text = f"{share} of the time waits, mostly for {peer.name}: {slowed}"
        return Culprit(CulpritKind.SLOWED_WORKER, waiting, text, advice)
    if stands_out and peer.waits is not None and peer.waits < HARDLY_WAITS:
        text = f"{share} of the time waits, mostly for {peer.name}, whose steps take the longest"
        return Culprit(CulpritKind.SLOW_WORKER, waiting, text, _SLOW_ADVICE)
    if (link := peer.link) is not None and link.explains(waiting):
        most = "" if stands_out else ", most of all"
        text = f"{share} of the time waits{most} for link {link.name}: {link.use}"
        return Culprit(CulpritKind.SLOW_LINK, waiting, text, _LINK_ADVICE)
    if stands_out:
        late = "" if peer.waits is None else ", whose messages arrive late"
        text = f"{share} of the time waits, mostly for {peer.name}{late}{peer.way}"
    else:
        text = f"{share} of the time waits for peers' messages, of no worker in particular"
        text += "" if link is None else f"; longest over link {link.figures}"
    return Culprit(CulpritKind.WAITING, waiting, text, _LATE_ADVICE)


def run_use(summary: Mapping[str, Any], policy: str = "") -> RunUse:
    """The figures of a summary."""
    workers: Sequence[Mapping[str, Any]] = [each for each in summary["workers"] if each["steps"]]
    use, environment = summary["time_use"] or {}, summary.get("environment")
    changes, batch_changes = (
        {each["name"]: change for each in workers if (change := each.get(name)) is not None}
        for name in ("pace_change", "batch_change")
    )
    return RunUse(
        fractions={
            name.removesuffix("_fraction"): value
            for name, value in use.items()
            if name.endswith("_fraction") and value is not None
        },
        worker_count=max(1, len(workers)),
        awaited=_awaited(workers, use, environment),
        pace_changes=changes,
        batch_changes=batch_changes,
        policy=policy,
        links=link_medium(environment),
    )


def _awaited(
    workers: Sequence[Mapping[str, Any]],
    use: Mapping[str, Any],
    environment: Mapping[str, Any] | None,
) -> AwaitedPeer | None:
    if not use.get("waited_for"):
        return None
    first, by_rank = use["waited_for"][0], {each["rank"]: each for each in workers}
    if (peer := by_rank.get(first["rank"])) is None:
        return AwaitedPeer(f"worker {first['rank']}", first["fraction"], None)
    waits = peer["waited_s"] / peer["compute_s"] if peer["compute_s"] > 0 else None
    waiter = max(workers, key=lambda each: _waited_for(each, peer["rank"]))
    link = link_between(peer, waiter, environment)
    return AwaitedPeer(peer["name"], first["fraction"], waits, link)


def _waited_for(worker: Mapping[str, Any], rank: int) -> float:
    found = (each["seconds"] for each in worker["waited_for"] if each["peer"] == rank)
    return float(next(found, 0.0))


def _slowed(use: RunUse, name: str, called: str) -> tuple[str, str]:
    """How much slower that worker has become, and the advice."""
    text = f"{called} computes at {_percent((use.pace_changes or {})[name])} of what it did"
    batch = (use.batch_changes or {}).get(name, 1.0)
    if batch >= IS_SMALLER:
        return f"{text} at the start", _SLOWED_ADVICE
    advice = f"{_SMALLER_ADVICE}{_SLOWED_ADVICE[0].lower()}{_SLOWED_ADVICE[1:]}"
    return f"{text} at the start, with batches of {_percent(batch)} of the size", advice


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
