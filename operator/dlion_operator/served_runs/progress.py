"""Compute progress, pace and losses of a run from its workers' records. Pure, bounded memory."""

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dlion_api.drift import DriftMeter
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.progress import (
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.reasons import EventReason
from dlion_api.remaining_time import Remaining, RemainingTime
from dlion_api.spec import Job
from dlion_api.status import LinkStatus, Metric, TrainerStatus
from dlion_api.status.model import SHORT
from dlion_api.status_names import R_SQUARED, program_metric_name
from dlion_operator.federation.reports import LinksTo

PACE_STEPS = 32
"""A worker's pace is taken over this number of steps."""
RATE_TOLERANCE = 0.1
"""A link's rate is reported again once it has changed by this fraction."""
_PARTS = {
    "compute": "compute_s",
    "wait": "waited_s",
    "select": "select_s",
    "encode": "encode_s",
    "send": "send_s",
    "decode": "decode_s",
    "apply": "apply_s",
}
"""Parts of a worker's time, and the fields of step records that have their seconds."""
MAX_PROGRAM_METRICS = 16
"""Metrics of `compile()` in a status, which has 32 places."""
EXTRA_RANKS = 1024
"""Limit for ranks in workers' records: groups may grow, memory must not."""


class _StepCounter(NamedTuple):
    """The values that a pace is computed from."""

    time_s: float
    iteration: int
    samples: int
    """Samples of this worker so far."""


@dataclass
class _WorkerProgress:
    steps: deque[_StepCounter] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """The latest ones."""
    loss: float = math.nan
    accuracy: float = math.nan
    accuracy_name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `compile()` of its newest evaluation."""
    global_batch_size: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the known steps, by part of the worker's time."""
    waited_for_s: dict[int, float] = field(default_factory=dict)

    def spend(self, record: StepRecord, max_rank: int) -> None:
        """Add the parts of one step's time; peers of higher ranks cannot be."""
        self.seconds["wall"] = self.seconds.get("wall", 0.0) + record.wall_s
        for part, name in _PARTS.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + (getattr(record, name) or 0.0)
        for rank in (each for each in record.waited_for if each < max_rank):
            part_s = record.waited_s / len(record.waited_for)
            self.waited_for_s[rank] = self.waited_for_s.get(rank, 0.0) + part_s


class RunProgress:
    def __init__(self, job: Job) -> None:
        self._remaining, self._trains = RemainingTime(job.spec), job.spec.exchange.trains
        self._workers: dict[Rank, _WorkerProgress] = {}
        self._links: dict[tuple[Rank, Rank], LinkRecord] = {}
        self._reported_rates: dict[SiteName, float] = {}
        self._drifting = DriftMeter()
        self._drift: float | None = None
        self._sites = {worker.rank: worker.site for worker in job.workers()}
        self._max_rank = 2 * (job.workers()[-1].rank + 1) + EXTRA_RANKS
        self.training = False
        self.stop_reason = ""
        """The reason of the first worker that stopped."""

    def expect(self, workers: tuple[WorkerIdentity, ...]) -> None:
        """Set the job's current workers; figures of others no longer count."""
        sites = self._sites = {worker.rank: worker.site for worker in workers}
        self._workers = {rank: each for rank, each in self._workers.items() if rank in sites}
        self._remaining.expect(sites)

    def take(self, record: ProgressRecord) -> None:
        """Add one record, in order of arrival."""
        worker = self._workers.setdefault(record.rank, _WorkerProgress())
        match record:
            case StepRecord():
                self.training = True
                self._remaining.take(record)
                if worker.steps and record.iteration <= worker.steps[-1].iteration:
                    worker.steps.clear()  # it resumed from a checkpoint: its old pace is void
                worker.steps.append(_StepCounter(record.time_s, record.iteration, record.samples))
                worker.spend(record, self._max_rank)
                worker.loss = record.loss
                worker.global_batch_size = record.global_batch_size
            case EvaluationRecord():
                worker.accuracy, worker.accuracy_name = record.accuracy, record.accuracy_name
                worker.metrics = record.metrics
                self._remaining.take(record)
                if (compared := self._drifting.add(record)) is not None:
                    self._drift = compared[1] if math.isfinite(compared[1]) else None
            case LinkRecord(neighbour=False):
                self._links.pop((record.rank, record.peer), None)
            case LinkRecord() if record.peer < self._max_rank:
                self._links[record.rank, record.peer] = record
            case EventRecord(reason=EventReason.TRAINING_STARTED):
                self.training = True
            case EventRecord(reason=EventReason.TRAINING_STOPPED):
                self.stop_reason = self.stop_reason or record.message
            case _:
                pass

    def steps_per_second(self) -> str:
        """The median worker's pace, as in the printer column. Empty: not known yet."""
        paces = sorted(pace for pace in map(_pace, self._training()) if pace is not None)
        return f"{paces[len(paces) // 2]:.2f}" if paces else ""

    def iteration(self) -> int:
        """Iteration of the most advanced worker that reports here; 0 before the first step."""
        return max((each.steps[-1].iteration for each in self._training() if each.steps), default=0)

    def _training(self) -> list[_WorkerProgress]:
        """The workers whose steps count; sensors make other ones."""
        return [each for rank, each in self._workers.items() if self._trains(rank)]

    def samples_per_s(self) -> float:
        """Total speed of all workers that report here."""
        return sum(_pace(worker, "samples") or 0.0 for worker in self._workers.values())

    def linked(self, membership: Membership) -> Mapping[SiteName, int]:
        """Number of workers per site that were linked with a present worker in its latest link
        report."""
        ready = {member.identity.rank for member in membership.ready()}
        peers = {link.peer for link in self._current_links(ready) if link.connected}
        return Counter(self._sites[peer] for peer in peers if peer in self._sites)

    def _current_links(self, ranks: Collection[Rank]) -> Iterator[LinkRecord]:
        """The links in the latest report of each of these workers, which reports all together."""
        last_s: dict[Rank, float] = {}
        for (rank, _), link in self._links.items():
            last_s[rank] = max(link.time_s, last_s.get(rank, link.time_s))
        links = self._links.values()
        return (each for each in links if each.rank in ranks and each.time_s == last_s[each.rank])

    def links(self, membership: Membership) -> LinkStatus | None:
        """The links between present workers, and the slowest pair of sites, or None."""
        sites, ready = self._sites, {member.identity.rank for member in membership.ready()}
        known = {pair: link for pair, link in self._links.items() if set(pair) <= ready}
        if not known:
            return None
        rates = [
            (link.bandwidth_bytes_per_s, f"{sites[rank]} to {sites[peer]}")
            for (rank, peer), link in known.items()
            if link.bandwidth_bytes_per_s is not None and rank in sites and peer in sites
        ]
        slowest = min(rates, default=(0.0, ""))
        return LinkStatus(
            connected=sum(link.connected for link in known.values()),
            # With a topology each worker has fewer links than peers: count the reported links.
            expected=len(known),
            slowest=slowest[1][:128],
        )

    def links_to(self, own: SiteName, membership: Membership) -> tuple[LinksTo, ...]:
        """Links from this site's present workers to each other site, by name.

        A rate is reported again only when it has changed by a tenth, so that reports change rarely.
        """
        ready = {m.identity.rank for m in membership.ready() if m.identity.site == own}
        links_by_site: dict[SiteName, list[LinkRecord]] = {}
        for link in self._current_links(ready):
            if (site := self._sites.get(link.peer, own)) != own:
                links_by_site.setdefault(site, []).append(link)
        reports = []
        for site, links in sorted(links_by_site.items()):
            up = [link for link in links if link.connected]
            rates = [each.bandwidth_bytes_per_s for each in up]
            slowest = min((rate for rate in rates if rate is not None), default=0.0)
            rate = self._reported_rates.get(site, 0.0)
            if not math.isclose(rate, slowest, rel_tol=RATE_TOLERANCE):
                rate = self._reported_rates[site] = slowest
            reports.append(LinksTo(site, len(up), len(links), rate))
        return tuple(reports)

    def trainer_status(self, now: str) -> TrainerStatus | None:
        """The training progress, or None if nothing is known. `now` is in Kubernetes' format."""
        if not any(worker.steps for worker in self._workers.values()):
            return None
        predicted = self._remaining.predict()
        return TrainerStatus(
            progress_percentage=None
            if predicted.fraction is None
            else int(100 * predicted.fraction),
            estimated_remaining_seconds=None
            if predicted.seconds is None
            else round(predicted.seconds),
            metrics=(
                *self._metrics(),
                *_target_metric(predicted),
                *self._time_metrics(),
                *self._program_metrics(),
            ),
            accuracy_name=self._accuracy_name(),
            last_updated_time=now,
        )

    def _metrics(self) -> list[Metric]:
        workers = self._workers.values()
        losses = [w.loss for w in workers if math.isfinite(w.loss)]
        accuracies = [w.accuracy for w in workers if math.isfinite(w.accuracy)]
        figures = [
            ("loss", sum(losses) / len(losses) if losses else None, "{:.4g}"),
            ("accuracy", sum(accuracies) / len(accuracies) if accuracies else None, "{:.4f}"),
            ("drift", self._drift, "{:.4g}"),
            ("globalBatchSize", max((w.global_batch_size for w in workers), default=0), "{:d}"),
            ("iteration", self.iteration() or None, "{:d}"),
        ]
        return [Metric(name=n, value=form.format(v)) for n, v, form in figures if v is not None]

    def _accuracy_name(self) -> str | None:
        """Records are not trusted: any other name than R² counts as none."""
        evaluated = [w for w in self._workers.values() if math.isfinite(w.accuracy)]
        names = {worker.accuracy_name for worker in evaluated}
        return R_SQUARED if names == {R_SQUARED} else None

    def _program_metrics(self) -> Iterator[Metric]:
        """Metrics of `compile()`: means over the workers here that have a finite value."""
        known: defaultdict[str, list[float]] = defaultdict(list)
        for worker in self._workers.values():
            for name, value in worker.metrics.items():
                if math.isfinite(value) and 0 < len(shown := program_metric_name(name)) <= SHORT:
                    known[shown].append(value)
        for name, values in itertools.islice(known.items(), MAX_PROGRAM_METRICS):
            yield Metric(name=name, value=f"{sum(value / len(values) for value in values):.4g}")

    def _time_metrics(self) -> Iterator[Metric]:
        """Shares of the steps' time, and the peer that was waited for most with its share."""
        total: defaultdict[str, float] = defaultdict(float)
        waited: defaultdict[int, float] = defaultdict(float)
        for worker in self._workers.values():
            for part, seconds in worker.seconds.items():
                total[part] += seconds
            for rank, seconds in worker.waited_for_s.items():
                waited[rank] += seconds
        wall_s = total.pop("wall", 0.0)
        if wall_s <= 0:
            return
        shares = {part: _share(seconds, wall_s) for part, seconds in total.items()}
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
        for part, share in shares.items():
            yield Metric(name=f"{part}Fraction", value=f"{share:.4f}")
        if total["wait"] > 0 and waited:
            rank, seconds = max(waited.items(), key=lambda item: item[1])
            yield Metric(name="waitedForRank", value=f"{rank}")
            yield Metric(name="waitedForFraction", value=f"{_share(seconds, total['wait']):.4f}")


def _share(part_s: float, whole_s: float) -> float:
    """A share from 0 to 1, also of a faulty worker's seconds: the definition refuses long
    values."""
    return min(1.0, max(0.0, part_s / whole_s))


def _target_metric(predicted: Remaining) -> Iterator[Metric]:
    """The range until the target accuracy, if there is one."""
    if predicted.target_s is not None:
        low_s, high_s = predicted.target_s
        yield Metric(name="secondsToTarget", value=f"{low_s:.0f} to {high_s:.0f}")


def _pace(
    worker: _WorkerProgress, of: Literal["iteration", "samples"] = "iteration"
) -> float | None:
    """Units per second over the worker's last steps. None: not known, or no progress."""
    if len(worker.steps) < 2:
        return None
    first, last = worker.steps[0], worker.steps[-1]
    done: float = getattr(last, of) - getattr(first, of)
    span_s = last.time_s - first.time_s
    return done / span_s if done > 0 and span_s > 0 else None
