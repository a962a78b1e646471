"""The parts without faults: the job over three sites, and its machines each alone."""

from __future__ import annotations

from itertools import permutations

import run_records
import yaml
from federated_sites import Document, wait_until
from federated_training import Setting, Training, training
from measured import Bar, Measured

TRAIN_S = 1500.0
"""Longest time of a run."""


def train(setting: Setting) -> Measured:
    """Train the whole job and record its status at every site."""
    return _trained(setting, setting.document("cifar10"), shown=True)


def alone(setting: Setting) -> Measured:
    """Train the same machines at the same time, each alone: no exchange."""
    document = setting.document(
        "alone", exchange={"policy": "none"}, knowledgeTransfer={"policy": "none"}
    )
    return _trained(setting, document, shown=False)


def _trained(setting: Setting, document: Document, *, shown: bool) -> Measured:
    """Train to the end; return samples/s, accuracy and each site's status."""
    with training(setting, document) as job:
        job.wait_for_iterations(setting.every_steps)
        statuses = {site: _shown(setting, site, job) for site in job.watches}
        wait_until(
            lambda: all(job.state(site) == "Succeeded" for site in job.watches),
            within_s=TRAIN_S,
            what=f"{job.job} succeeds at all sites",
        )
        at_the_end = {site: watch.status for site, watch in job.watches.items()}

        def all_evaluated() -> bool:
            job.fetch()
            return len(run_records.final_accuracies(job.records)) == len(job.ranks)

        wait_until(all_evaluated, within_s=60, what="every replica's last evaluation")
    evaluations = run_records.final_accuracies(job.records)
    by_rank = [evaluations[rank] for rank in job.ranks.values()]
    steps = run_records.steps_of(job.records)
    figures = {
        "seed": document["spec"]["trainer"]["seed"],
        "samples": sum(step.local_batch_size for step in steps),
        "iterations": max(step.iteration for step in steps),
        "seconds": steps[-1].time_s - (steps[0].time_s - steps[0].wall_s),
        "samples_per_s": run_records.samples_per_s(job.records),
        "accuracy": sum(each.accuracy for each in by_rank) / len(by_rank),
        "accuracies": [each.accuracy for each in by_rank],
        "evaluated_samples": min(each.evaluated_samples for each in by_rank),
        "shown": {
            site: [each["name"] for each in status["sites"]] for site, status in statuses.items()
        },
        "at_the_end": at_the_end,
    }
    bars = [_all_shown(statuses, setting.sites.names)] if shown else []
    return Measured(setting.out.name, figures, bars)


def _shown(setting: Setting, site: str, job: Training) -> Document:
    """Return `kubectl get dlj -o yaml` of the job there, and store it as a file."""
    text = setting.sites.kubectl(site).run("get", "dlj", job.job, "-o", "yaml")
    (setting.out / f"{site}.yaml").write_text(text)
    return dict(yaml.safe_load(text)["status"])


def _all_shown(statuses: dict[str, Document], names: tuple[str, ...]) -> Bar:
    good = [site for site, status in statuses.items() if _is_complete(site, status, names)]
    what = (
        "every site's status shows all sites with workers, step, samples/s and last heartbeat, and"
        " what the links between each two of them carry"
    )
    return Bar(what, f"at {len(good)} of {len(statuses)}", len(good) == len(statuses))


def _is_complete(own: str, status: Document, names: tuple[str, ...]) -> bool:
    """Report whether that site's status has all required fields of each site and each pair."""
    rows, pairs = status["sites"], status["links"].get("pairs", ())
    has_sites = [row["name"] for row in rows] == list(names) and all(
        row["readyWorkers"] == row["workers"]
        and row.get("iteration")
        and row.get("samplesPerSecond")
        and (row["name"] == own or row.get("lastHeartbeatTime"))
        for row in rows
    )
    wanted = {f"{one} to {other}" for one, other in permutations(names, 2)}
    has_links = {each["pair"] for each in pairs} == wanted and all(
        each["connected"] == each["expected"] and each.get("megabitsPerSecond") for each in pairs
    )
    return has_sites and has_links
