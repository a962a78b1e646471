"""The environment file: its fields, bounds and rules.

Declared like a manifest, so that every problem of a file is reported at once. `planning` computes a
plan from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from dlion_api.document import Check, Limits, Rule, exactly_one, setting
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job
from dlion_environments.plan import Plan
from dlion_environments.planning import check_start, plan_environment
from dlion_environments.scheduled_events import unreached_paths
from dlion_environments.times import common_lengths, describe_lengths
from dlion_environments.validation import file_problems, time_orders

MAX_WORKERS = 1000
MAX_MBIT_PER_S = 1e6
MAX_LOSS_PERCENT = 50.0
MAX_LATENCY_MS = 10_000
_CELSIUS: Mapping[str, Any] = {"minimum": -100, "maximum": 300, "unit": "°C"}

_Rate = Annotated[float, Limits(above=0, maximum=MAX_MBIT_PER_S)]
_Loss = Annotated[float, Limits(minimum=0, maximum=MAX_LOSS_PERCENT)]
_Cores = Annotated[float, Limits(above=0, maximum=1e6)]
_Index = Annotated[int, Limits(minimum=0, maximum=MAX_WORKERS - 1)]
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_DESCRIPTION = "lower-case letters, digits and hyphens"
_SiteLabel = Annotated[
    str, Limits(pattern=_LABEL, pattern_description=_LABEL_DESCRIPTION, max_length=63)
]


def _label(doc: str) -> Any:
    return setting(doc, pattern=_LABEL, pattern_description=_LABEL_DESCRIPTION, max_length=63)


def _rate(doc: str) -> Any:
    return setting(doc, default=None, above=0, maximum=MAX_MBIT_PER_S, unit="Mbit/s")


def _latency(doc: str, default: float | None = None) -> Any:
    return setting(doc, default=default, minimum=0, maximum=MAX_LATENCY_MS, unit="milliseconds")


def _loss(doc: str, default: float | None = None) -> Any:
    return setting(
        f"for the simulator: packets lost {doc}",
        default=default, minimum=0, maximum=MAX_LOSS_PERCENT, unit="percent",
    )  # fmt: skip


def _list(doc: str, *, unit: str = "", unique: bool = False) -> Any:
    """A change that lists workers, sites, links, or a value for each worker."""
    return setting(doc, default=None, max_items=MAX_WORKERS, unit=unit, unique=unique)


def _two(doc: str) -> Any:
    return setting(doc, default=None, min_items=2, max_items=2, unique=True)


@dataclass(frozen=True, kw_only=True)
class EnvironmentTime:
    """A time in the run."""

    fraction: float | None = setting(
        "as a fraction of the job's stop.maxSeconds.", default=None, above=0, below=1
    )
    seconds: float | None = setting(
        "in seconds after the start.", default=None, minimum=0, maximum=1e9, unit="seconds"
    )
    rules: ClassVar[tuple[Rule, ...]] = (exactly_one(fraction="fraction", seconds="seconds"),)


@dataclass(frozen=True, kw_only=True)
class EnvironmentAmbient:
    """The air around a machine from some time on."""

    at: EnvironmentTime = setting("from when on.")
    celsius: float = setting("its temperature.", **_CELSIUS)


@dataclass(frozen=True, kw_only=True)
class EnvironmentThrottle:
    """How the hardware slows down by itself while it is hot."""

    trip_celsius: float = setting("temperature at which it slows down.", **_CELSIUS)
    resume_celsius: float = setting("temperature at which it is fast again.", **_CELSIUS)
    speed: float = setting("share of its speed meanwhile.", above=0, below=1)
    power: float | None = setting(
        "share of its power above idle meanwhile; default: as the speed.",
        default=None, minimum=0, maximum=1,
    )  # fmt: skip
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.resumeCelsius < self.tripCelsius",
            message="resumeCelsius must be below tripCelsius",
            holds=lambda it: it.resume_celsius < it.trip_celsius,
            reads=("resumeCelsius", "tripCelsius"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentThermals:
    """For the simulator: how a machine warms up."""

    joules_per_kelvin: float = setting("its heat capacity.", above=0, maximum=1e7, unit="J/K")
    kelvin_per_watt: float = setting(
        "its thermal resistance to the air.", above=0, maximum=1e4, unit="K/W"
    )
    idle_watts: float = setting("power without load.", minimum=0, maximum=1e5, unit="W")
    busy_watts: float = setting("power while it computes.", above=0, maximum=1e5, unit="W")
    ambient_celsius: float = setting("temperature of the air at the start.", **_CELSIUS)
    ambient: tuple[EnvironmentAmbient, ...] = setting(
        "later temperatures of the air, in order of time.", default=(), max_items=1000
    )
    throttle: EnvironmentThrottle | None = setting(
        "the hardware's own throttle; default: none.", default=None
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.idleWatts < self.busyWatts",
            message="idleWatts must be below busyWatts",
            holds=lambda it: it.idle_watts < it.busy_watts,
            reads=("idleWatts", "busyWatts"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentDemandPhase:
    """Some time in which other work takes the same from a machine."""

    seconds: float = setting("how long.", minimum=0.001, maximum=1e9, unit="seconds")
    cores: float = setting(
        "what it takes, in the relative units of the machine's cores; the worker keeps half.",
        minimum=0, maximum=1e6,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EnvironmentDemand:
    """For the simulator: what other work on a worker's machine takes."""

    phases: tuple[EnvironmentDemandPhase, ...] = setting(
        "one after another from the start.", min_items=1, max_items=1000
    )
    repeat: bool = setting(
        "whether the first follows the last; otherwise the last one stays.", default=True
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentWaypoint:
    """Where a worker is at some time; it moves straight to the next."""

    seconds: float = setting("after the start.", minimum=0, maximum=1e9, unit="seconds")
    x: float = setting("metres to the east.", minimum=-1e7, maximum=1e7, unit="metres")
    y: float = setting("metres to the north.", minimum=-1e7, maximum=1e7, unit="metres")


@dataclass(frozen=True, kw_only=True)
class EnvironmentRadio:
    """For the simulator: links between workers that move."""

    range_metres: float = setting("its reach without fading.", above=0, maximum=1e6, unit="metres")
    mbit_per_s: float = setting(
        "rate of a link of two near workers.", above=0, maximum=MAX_MBIT_PER_S, unit="Mbit/s"
    )
    beyond_mbit_per_s: float = setting(
        "rate of a worker with all others beyond reach together, each way.",
        above=0, maximum=MAX_MBIT_PER_S, unit="Mbit/s",
    )  # fmt: skip
    fading_decibels: float = setting(
        "standard deviation of the signal's strength, by shadows.",
        default=3.0, minimum=0, maximum=30, unit="dB",
    )  # fmt: skip
    every_seconds: float = setting(
        "how often rates change.", default=5.0, minimum=1, maximum=3600, unit="seconds"
    )
    seed: int = setting("of the fading.", default=1, minimum=0, maximum=2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class EnvironmentMachine:
    """Consecutive workers with the same machine."""

    count: int = setting(
        "how many workers in a row are like this.", default=1, minimum=1, maximum=MAX_WORKERS
    )
    cores: float = setting("compute of each, in relative units.", above=0, maximum=1e6)
    mbit_per_s: float | None = _rate("rate of each one's uplink and of its downlink.")
    uplink_mbit_per_s: float | None = _rate("rate of the uplink, where it differs.")
    downlink_mbit_per_s: float | None = _rate("rate of the downlink, where it differs.")
    loss_percent: float = _loss("on each one's uplink, and on its downlink.", default=0.0)
    demand: EnvironmentDemand | None = setting(
        "for the simulator: what other work takes from each; default: nothing.", default=None
    )
    thermals: EnvironmentThermals | None = setting(
        "for the simulator: how each warms up; default: its temperature is not simulated.",
        default=None,
    )
    track: tuple[EnvironmentWaypoint, ...] = setting(
        "for the simulator: the way of a worker with a radio, in order of time.",
        default=(), max_items=10_000,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EnvironmentSite:
    """A site and its number of workers; workers are assigned to sites in order."""

    name: str = _label("name of the site within this file: the job's sites match by position.")
    workers: int = setting("workers of the site.", minimum=1, maximum=MAX_WORKERS)


@dataclass(frozen=True, kw_only=True)
class EnvironmentTraffic:
    """Limits of traffic inside a site, or between sites."""

    mbit_per_s: float | None = _rate(
        "rate that all such traffic shares, each way: of a worker inside its site, of all workers"
        " of a site between sites (perPeer: of each link between two workers)."
    )
    latency_ms: float = _latency("latency one way.", default=0.0)
    loss_percent: float = _loss("on the way, beside those of the workers' own links.", default=0.0)


@dataclass(frozen=True, kw_only=True)
class EnvironmentLink:
    """The link between two workers, or all links between two sites."""

    workers: tuple[_Index, ...] | None = _two("ranks of its two ends.")
    sites: tuple[_SiteLabel, ...] | None = _two("names of the two sites.")
    rules: ClassVar[tuple[Rule, ...]] = (exactly_one(workers="workers", sites="sites"),)


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange:
    """A change at some time; fields that are not set stay as before."""

    at: EnvironmentTime = setting("when.")
    permutation: tuple[_Index, ...] | None = _list(
        "worker k gets what worker permutation[k] had at the start: cores and rates.", unique=True
    )
    cores: tuple[_Cores, ...] | None = _list("relative compute of every worker.")
    mbit_per_s: tuple[_Rate, ...] | None = _list("rate of every worker, both ways.", unit="Mbit/s")
    between_sites_mbit_per_s: float | None = _rate(
        "rate of each site's uplink, and of its downlink."
    )
    inside_sites_latency_ms: float | None = _latency("latency inside a site, one way.")
    between_sites_latency_ms: float | None = _latency("latency between sites, one way.")
    loss_percent: tuple[_Loss, ...] | None = _list(
        "for the simulator: packets lost on every worker's links, each way.", unit="percent"
    )
    inside_sites_loss_percent: float | None = _loss("inside a site.")
    between_sites_loss_percent: float | None = _loss("between sites.")
    cut_workers: tuple[_Index, ...] | None = _list(
        "ranks that are cut off from all others; an empty list restores.", unique=True
    )
    cut_sites: tuple[_SiteLabel, ...] | None = _list(
        "sites that are cut off from all others; an empty list restores.", unique=True
    )
    cut_links: tuple[EnvironmentLink, ...] | None = _list(
        "links that are cut, one by one; an empty list restores."
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentStraggler:
    """For the simulator: workers that are slower than their cores imply, always or at random."""

    workers: tuple[_Index, ...] | None = setting(
        "their ranks; default: all.",
        default=None, min_items=1, max_items=MAX_WORKERS, unique=True,
    )  # fmt: skip
    slowdown: float = setting(
        "a step's core seconds are so many times the usual.", above=1, maximum=10_000
    )
    chance: float = setting(
        "chance of each step to be so slow, by the job's seed.", default=1.0, above=0, maximum=1
    )
    begins: EnvironmentTime | None = setting("from when on. Default: the start.", default=None)
    ends: EnvironmentTime | None = setting("until when. Default: the end of the run.", default=None)


@dataclass(frozen=True, kw_only=True)
class EnvironmentAbsence:
    """For the simulator: a worker that leaves (its process dies), returns, or joins late."""

    worker: int = setting("its rank.", minimum=0, maximum=MAX_WORKERS - 1)
    leaves: EnvironmentTime | None = setting(
        "when its process dies. Default: it is not there at the start.", default=None
    )
    comes: EnvironmentTime | None = setting(
        "when a new process of it is ready to train. Default: it stays away.", default=None
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.leaves) || has(self.comes)",
            message="an absence needs leaves, comes or both",
            holds=lambda it: it.leaves is not None or it.comes is not None,
            reads=("leaves", "comes"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machines and links of a run, in the order of the job's ranks."""

    name: str = _label("name of the environment.")
    description: str = setting("what it stands for.", default="", max_length=1000)
    workers: tuple[EnvironmentMachine, ...] = setting(
        "the workers, in order of rank.", min_items=1, max_items=MAX_WORKERS
    )
    core_scale: float | None = setting(
        "CPU cores of this machine per relative unit; default: so that all quotas together are"
        " 80 % of the machine's cores less 0.02 core per worker for its sidecar.",
        default=None, above=0, maximum=1000, unit="cores",
    )  # fmt: skip
    samples_per_s_per_core: float = setting(
        "for the simulator: what one relative unit computes.",
        default=10.0, above=0, maximum=1e9, unit="samples/s",
    )  # fmt: skip
    message_overhead_bytes: int | None = setting(
        "for the simulator: what a message takes of a link beside its payload; default: 128.",
        default=None, minimum=0, maximum=65536, unit="bytes",
    )  # fmt: skip
    link_shape: Literal["sharedUplink", "perPeer"] = setting(
        "whether the rates of a worker and of a site are shared by all their links, or each link"
        " between two workers has them.",
        default="sharedUplink",
    )
    sites: tuple[EnvironmentSite, ...] = setting(
        "sites, where the job's must match them; default: any sites will do.",
        default=(), max_items=MAX_WORKERS, key="name",
    )  # fmt: skip
    inside_sites: EnvironmentTraffic | None = setting("traffic inside a site.", default=None)
    between_sites: EnvironmentTraffic | None = setting("traffic between sites.", default=None)
    radio: EnvironmentRadio | None = setting(
        "for the simulator: links that follow the workers' tracks; default: none.", default=None
    )
    changes: tuple[EnvironmentChange, ...] = setting(
        "what changes during the run, in order of time.", default=(), max_items=1000
    )
    stragglers: tuple[EnvironmentStraggler, ...] = setting(
        "for the simulator: workers that are slower than their cores imply.",
        default=(), max_items=MAX_WORKERS,
    )  # fmt: skip
    absences: tuple[EnvironmentAbsence, ...] = setting(
        "for the simulator: workers that leave, return or join late.",
        default=(), max_items=MAX_WORKERS,
    )  # fmt: skip
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Line of each path in its file, if known; not a field of the file."""
    file: str = field(default="", compare=False, repr=False)
    """Path of its file; empty for a published one. Not a field of the file."""

    checks: ClassVar[tuple[Check, ...]] = (file_problems,)

    @property
    def worker_count(self) -> int:
        """The number of its workers."""
        return sum(machine.count for machine in self.workers)

    def plan(
        self,
        workers: tuple[WorkerIdentity, ...],
        machine_cores: float | None,
        *,
        duration_s: float | None = None,
        source: str = "the job",
    ) -> Plan:
        """The plan for these workers on a machine with `machine_cores` cores.

        `duration_s` is the job's `stop.maxSeconds`; changes at a fraction of the run require it.
        Raises SpecError if environment and job do not match.
        """
        return plan_environment(self, workers, machine_cores, duration_s, source)

    @property
    def run_lengths(self) -> str:
        """For which run lengths all times are in order, as text; empty for all."""
        return describe_lengths(common_lengths(time_orders(self, lambda _: True)))

    def unreached(self, duration_s: float | None) -> list[str]:
        """Paths of times that a run of that length does not reach; empty if the length is
        unknown."""
        return unreached_paths(self, duration_s)

    def check(self, job: Job, *, source: str = "the job") -> None:
        """Raises SpecError if the job's run would wait for workers that come late."""
        check_start(self, job, source)
