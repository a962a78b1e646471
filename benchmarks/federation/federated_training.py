"""A job that trains at three sites during a measurement, and its records.

This module starts and ends the job and fetches its records. The parts of `three_sites` call it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import run_records
from federated_sites import Document, FederatedSites, wait_until
from status_watch import StatusWatch, watched

from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import EVENTS

START_S = 240.0
"""Maximum seconds from `dlion submit` to training at all sites, on a busy machine."""


@dataclass(frozen=True)
class Setting:
    """The input of a part."""

    sites: FederatedSites
    manifest: Document
    out: Path
    """Folder of this part only."""

    @property
    def every_steps(self) -> int:
        """Return the iterations of a knowledge-transfer period."""
        return int(self.manifest["spec"]["knowledgeTransfer"]["everySteps"])

    def document(self, name: str, **spec: Any) -> Document:
        """Return the manifest under that name, with these sections replaced."""
        document = copy.deepcopy(self.manifest)
        document["metadata"]["name"] = name
        document["spec"] |= spec
        return document

    def endless(self, name: str, **spec: Any) -> Document:
        """Return the manifest for faults: it runs until its deletion, with frequent comparisons."""
        document = self.document(name, **spec)
        batch = document["spec"]["batching"]["globalBatchSize"]["initial"]
        document["spec"]["trainer"] |= {
            "evaluation": {"everySamples": 5 * batch, "maxSamples": 100},
            "stop": {"maxSeconds": 86_400},
        }
        return document


@dataclass
class Training:
    """A job that trains at all sites, and its records afterwards."""

    setting: Setting
    job: str
    watches: dict[str, StatusWatch]
    zero_s: dict[str, float]
    ranks: dict[str, Rank]
    """Rank of each site's worker."""
    records: list[ProgressRecord] = field(default_factory=list)
    """Set once they are fetched; times by this machine's monotonic clock."""

    def state(self, site: str) -> str:
        """Return the state in the printer column."""
        return str(self.watches[site].status.get("state", ""))

    def wait_until_all_train(self, within_s: float) -> None:
        """Return when every site reports that all train."""
        wait_until(
            lambda: all(self.state(site) == "Training" for site in self.watches),
            within_s=within_s,
            what=f"{self.job} trains at all sites",
        )

    def wait_for_iterations(self, count: int, within_s: float = 180.0) -> None:
        """Return after this many more iterations in the first site's status."""
        watch = next(iter(self.watches.values()))
        wanted = watch.iteration + count
        wait_until(lambda: watch.iteration >= wanted, within_s=within_s,
                   what=f"iteration {wanted} of {self.job}")  # fmt: skip

    def fetch(self) -> None:
        """Fetch the records of all sites, with times on one clock."""
        folders = self.setting.sites.fetch(self.job, self.setting.out / "results")
        by_site = {site: list(read_events(path / EVENTS)) for site, path in folders.items()}
        self.records = run_records.on_one_clock(by_site, self.zero_s)

    def degraded(self, since_s: float) -> dict[str, list[str]]:
        """Return when the condition changed at each site, in seconds from then."""
        return {
            site: [f"{'on' if holds else 'off'} {at_s - since_s:+.0f} s"
                   for at_s, holds in watch.turns("Degraded") if at_s >= since_s]
            for site, watch in self.watches.items()
        }  # fmt: skip

    def states(self, site: str, since_s: float, until_s: float) -> list[str]:
        """Return the states in the printer column between these times, each once, in order."""
        words = [str(status.get("state", "")) for at_s, status in self.watches[site].statuses
                 if since_s <= at_s <= until_s]  # fmt: skip
        return list(dict.fromkeys(words))

    def events(self, since_wall_s: float) -> dict[str, dict[str, int]]:
        """Return Kubernetes events of the job after that moment, by site and reason."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_wall_s))
        found: dict[str, dict[str, int]] = {site: {} for site in self.watches}
        for site, counts in found.items():
            for each in self.setting.sites.events(site, self.job):
                if each["last"] >= stamp:
                    counts[each["reason"]] = counts.get(each["reason"], 0) + each["count"]
        return found


@contextmanager
def training(setting: Setting, document: Document) -> Iterator[Training]:
    """Yield that job once it trains at all sites; store logs and delete the job at the end.

    After an interrupt it is not deleted: then all sites are removed.
    """
    job, sites = document["metadata"]["name"], setting.sites
    sites.submit(document)
    try:
        with watched(sites, job) as watches:
            ranks = {site: Rank(number) for number, site in enumerate(sites.names)}
            found = Training(setting, job, watches, {}, ranks)
            found.wait_until_all_train(START_S)
            found.zero_s = {site: sites.zero_s(site, job) for site in sites.names}
            yield found
    except Exception:
        _end(setting, job)
        raise
    _end(setting, job)


def _end(setting: Setting, job: str) -> None:
    setting.sites.keep_logs(job, setting.out / "logs")
    setting.sites.delete(job)
