"""Simulated jobs in which a worker or a site attacks the others from its own machine or data.

For benchmarks/insiders.py and tests/simulated/test_insiders.py. The attacker has a valid identity,
follows the protocol, and counts its own wrong contribution as the others do. This module changes
only its machine or data; the other workers run the product unchanged.

Import it in a separate process, because it loads TensorFlow. As a program it reads the arguments of
`run` from stdin, one JSON object a line. It writes an `InsiderRun` for each to the file that is its
argument.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from dlion_api.errors import DLionError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, EventRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import load_job
from dlion_core.policies.interface import Flat, LocalStepDone
from dlion_core.policies.weights.anchored_rounds import AnchoredRounds
from dlion_environments.loading import load_environment
from dlion_simulator.run import Simulation
from dlion_worker.training import datasets

if TYPE_CHECKING:
    from dlion_api.names import WorkerIdentity
    from dlion_api.protocol.progress import ProgressRecord
    from dlion_simulator.context import WorkerParts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"
ENVIRONMENT = {
    "name": "unequal",
    "workers": [
        {"count": 2, "cores": 4, "mbitPerS": 100},
        {"cores": 2, "mbitPerS": 50},
        {"cores": 6, "mbitPerS": 100},
    ],
    "sites": [{"name": "plant-a", "workers": 3}, {"name": "plant-b", "workers": 1}],
}
ATTACKER = Rank(1)


@dataclass(frozen=True)
class BadWorkers:
    """Which workers attack, all in the same way, and in which job."""

    ranks: frozenset[Rank]
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Settings of the job by dotted path."""


WORKER = BadWorkers(frozenset({ATTACKER}), ENVIRONMENT, {})
"""Worker 1 of four attacks. Its site has three workers."""

_SITES = {"plant-a": range(7), "plant-b": (3, 4, 5, 6, 7, 8, 9), "plant-c": (7, 8, 9, 0, 1, 2)}
SITE = BadWorkers(
    frozenset({Rank(0), Rank(1)}),
    {
        "name": "three-sites",
        "workers": [{"cores": cores, "mbitPerS": 100} for cores in (4, 2, 4, 6, 2, 4)],
        "sites": [{"name": name, "workers": 2} for name in _SITES],
    },
    {
        "sites": [{"name": name, "groups": [{"name": "all", "workers": 2}]} for name in _SITES],
        "trainer.dataset.siteClasses": [
            {"site": name, "classes": list(classes)} for name, classes in _SITES.items()
        ],
    },
)
"""Both workers of one of three sites attack. Each digit is at two sites."""


@dataclass
class Attacker:
    """The attacker's knowledge: what it has sent, and what the others have sent to it."""

    rng: np.random.Generator
    victim: Rank
    """An honest worker, to be isolated."""
    sent: list[Flat] = field(default_factory=list)
    honest: list[Flat] = field(default_factory=list)
    """Its own correct contributions so far."""
    others: dict[Rank, Flat] = field(default_factory=dict)
    """The last contribution of each other worker."""
    direction_D: Flat | None = None
    """A fixed direction of norm 1."""

    def fixed(self, size: int) -> Flat:
        if self.direction_D is None:
            some_D = self.rng.standard_normal(size).astype(np.float32)
            self.direction_D = some_D / np.float32(np.linalg.norm(some_D))
        return self.direction_D

    def usual_norm(self, honest_D: Flat) -> float:
        """The mean norm of the others' last contributions."""
        norms = [float(np.linalg.norm(one)) for one in self.others.values()]
        return float(np.mean(norms)) if norms else float(np.linalg.norm(honest_D))


def _constant(own: Attacker, honest_D: Flat) -> Flat:
    if not own.sent:
        return own.fixed(honest_D.size) * np.float32(own.usual_norm(honest_D))
    return own.sent[0]


def _little(own: Attacker, honest_D: Flat) -> Flat:
    """The mean of the others minus 1.5 standard deviations, entry by entry."""
    return _moved(own, honest_D, np.float32(-1.5))


def _little_both(own: Attacker, honest_D: Flat) -> Flat:
    """The mean plus or minus those deviations, by the sign of a fixed direction, so that signs
    balance."""
    return _moved(own, honest_D, np.float32(1.5) * np.sign(own.fixed(honest_D.size)))


def _moved(own: Attacker, honest_D: Flat, factor: Any) -> Flat:
    if len(own.others) < 2:
        return honest_D
    all_PD = np.stack(list(own.others.values()))
    moved_D: Flat = all_PD.mean(axis=0) + factor * all_PD.std(axis=0)
    return moved_D


def _drip(own: Attacker, honest_D: Flat) -> Flat:
    """The correct contribution plus a fixed direction, which grows to half of the usual norm."""
    part = min(0.5, 0.01 * len(own.sent))
    return honest_D + own.fixed(honest_D.size) * np.float32(part * own.usual_norm(honest_D))


def _frame(own: Attacker, honest_D: Flat) -> Flat:
    """The negative of the victim's last contribution, to isolate that worker."""
    victim_D = own.others.get(own.victim)
    return honest_D if victim_D is None else -victim_D


ATTACKS: Mapping[str, Callable[[Attacker, Flat], Flat]] = {
    "x100": lambda _, honest_D: honest_D * np.float32(100),
    "constant": _constant,
    "sign flip": lambda _, honest_D: -honest_D,
    "sign flip x3": lambda _, honest_D: honest_D * np.float32(-3),
    "little is enough": _little,
    "little, both signs": _little_both,
    "replay": lambda own, honest_D: own.honest[0] if len(own.honest) > 1 else honest_D,
    "free rider": lambda _, honest_D: np.zeros_like(honest_D),
    "slow drip": _drip,
    "frame a peer": _frame,
}
DATA_ATTACKS = ("label flip",)


@dataclass(frozen=True)
class InsiderRun:
    """The result of one run."""

    accuracy: float
    """Mean over the honest replicas at the end; 0 if it diverged."""
    named: Mapping[int, tuple[str, ...]]
    """By rank, the reasons that honest workers reported about that peer."""
    quarantined: tuple[int, ...]
    """Ranks of the workers that `exchange.quarantine` has removed."""
    steps: int
    problem: str = ""
    """Why it ended early."""


class _AttackedSimulation(Simulation):
    """A simulation in which some workers are changed."""

    def __init__(self, attack: str, bad: frozenset[Rank], **arguments: Any) -> None:
        self._attack, self._bad = attack, bad
        super().__init__(**arguments)

    def _data(self, identity: WorkerIdentity) -> datasets.DataSet:
        data = super()._data(identity)
        if self._attack == "label flip" and identity.rank in self._bad:
            flipped = {key: _with_flipped_labels(one) for key, one in data.parts.items()}
            return replace(data, parts=flipped)
        return data

    def _parts(self, identity: WorkerIdentity, *rest: Any) -> WorkerParts:
        parts = super()._parts(identity, *rest)
        if identity.rank in self._bad and self._attack in ATTACKS:
            seed = parts.job.spec.trainer.seed
            attack_machine(parts.machine.machine, self._attack, seed=seed, bad=self._bad)
        return parts


def _with_flipped_labels(samples: Any) -> Any:
    x, y = samples
    return x, (9 - np.asarray(y)).astype(np.asarray(y).dtype)


def attack_machine(machine: Any, name: str, *, seed: int, bad: frozenset[Rank]) -> None:
    """Let that machine send the contribution of the attack instead of its computed one."""
    machine = getattr(machine, "_machine", machine)  # of a merge of partitions
    own = Attacker(np.random.default_rng(seed), victim=Rank(max(bad) + 1))

    def changed(honest_D: Flat) -> Flat:
        own.honest.append(honest_D.copy())
        sent_D = ATTACKS[name](own, honest_D).astype(np.float32)
        own.sent.append(sent_D)
        return sent_D

    def remember(contributions: Mapping[Rank, Any]) -> None:
        own.others = {
            rank: one.part.weighted(np.float32(1))
            for rank, one in contributions.items()
            if rank not in bad and one.part is not None
        }

    if isinstance(machine, AnchoredRounds):
        chosen, close = machine.chosen, machine.close_round

        def choose() -> Any:
            assert machine.anchor_D is not None
            machine.residual.value_D[:] = changed(machine.anchor_D - machine.weights_D)
            return chosen()

        def closed(contributions: Mapping[Rank, Any], end: int) -> Any:
            remember(contributions)
            return close(contributions, end)

        machine.chosen, machine.close_round = choose, closed  # type: ignore[method-assign]
        return
    stepped, keep = machine.stepped, machine._keep

    def step(done: LocalStepDone) -> Any:
        return stepped(replace(done, gradient_D=changed(done.gradient_D)))

    def kept(sender: Rank, iteration: int, contribution: Any) -> Any:
        if contribution.part is not None and sender not in bad:
            own.others[sender] = contribution.part.weighted(np.float32(1))
        return keep(sender, iteration, contribution)

    machine.stepped, machine._keep = step, kept


def job_of(settings: Mapping[str, Any]) -> Any:
    """The example with settings by dotted path."""
    document = yaml.safe_load(EXAMPLE.read_text())
    for path, value in settings.items():
        *parents, last = path.split(".")
        node = document["spec"]
        for one in parents:
            node = node.setdefault(one, {})
        node[last] = value
    return load_job(document)


def run(
    attack: str,
    *,
    split: str,
    policy: str,
    robustness: str | None,
    seed: int,
    steps: int,
    settings: Mapping[str, Any] | None = None,
    bad: BadWorkers = WORKER,
) -> InsiderRun:
    """Simulate one job in which those workers attack."""
    fields = {
        **bad.settings,
        "trainer.dataset.partition": split,
        "trainer.seed": seed,
        "trainer.stop": {"maxSteps": steps},
        "trainer.evaluation.everySamples": 10**9,
        "exchange.policy": policy,
        "knowledgeTransfer.policy": "none",
        "batching.globalBatchSize": {"initial": 240, "growth": False},
        **({} if robustness is None else {"exchange.robustness": robustness}),
        **(settings or {}),
    }
    if split != "bySite":
        fields["trainer.dataset.siteClasses"] = []
    job = job_of(fields)
    records: list[ProgressRecord] = []
    with tempfile.TemporaryDirectory(prefix="dlion-insiders-") as folder:
        path = Path(folder) / "environment.yaml"
        path.write_text(yaml.safe_dump(dict(bad.environment)))
        plan = load_environment(str(path)).plan(
            job.workers(), machine_cores=None, duration_s=None, source=""
        )
        simulation = _AttackedSimulation(
            attack,
            bad.ranks,
            job=job,
            plan=plan,
            results_dir=Path(folder),
            data_root=Path(folder),
            program_root=Path(__file__).parent,
            on_record=lambda record, _: records.append(record),
            judge=lambda _: None,
            thread_count=1,
        )
        problem = ""
        try:
            simulation.run()
        except (DLionError, ValueError) as error:  # of any worker, the attacker included
            problem = f"{type(error).__name__}: {error}"[:200]
    named: dict[int, set[str]] = defaultdict(set)
    accuracies = []
    quarantined = []
    done = 0
    for one in records:
        done = max(done, getattr(one, "iteration", 0) or 0)
        if isinstance(one, EvaluationRecord) and one.final and one.rank not in bad.ranks:
            accuracies.append(one.accuracy)
        is_warning = isinstance(one, EventRecord) and one.reason == EventReason.UNUSUAL_VALUES
        if is_warning and one.rank not in bad.ranks:
            named[int(one.message.split()[1])].add(one.message)
        if isinstance(one, EventRecord) and one.reason == EventReason.WORKER_QUARANTINED:
            quarantined.append(int(one.rank))
    mean = 0.0 if problem or not accuracies else float(np.mean(accuracies))
    reported = {rank: tuple(sorted(reasons)) for rank, reasons in named.items()}
    return InsiderRun(mean, reported, tuple(quarantined), done, problem)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as answers:
        for line in sys.stdin:
            print(json.dumps(asdict(run(**json.loads(line)))), file=answers, flush=True)
