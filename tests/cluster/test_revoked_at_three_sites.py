"""Three operators beside as many real API servers, federated over loopback, and workers that join.

Proves: `dlion trust revoke` of a worker at its own site reaches the workers of all three sites in
ten seconds; its coordinator refuses it from then on; every site's status has it; it survives a
restart of operators; the same at another site acts there alone, and the others show it; `restore`
lifts both. Prints how long each took.
Left out: pods, links between workers (tests/local/test_revoked_links.py).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from test_federation import (
    ALL_SITES,
    GROUPS,
    Joined,
    OperatedSite,
    control_planes,
    eventually,
    manifest,
    three_sites,
)

from dlion_api.cluster_names import REVOKED_ANNOTATION
from dlion_api.spec import load_job
from dlion_cli.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["control_planes", "three_sites"]  # fixtures
pytestmark = pytest.mark.cluster
WITHIN_S = 10.0


class Listener:
    """A joined worker, and the newest membership that it has heard."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.call: Any = joined._updates
        self.latest: Any = next(self.call)

    def revoked(self) -> list[str]:
        """The names that no worker may accept, as this one hears."""
        members = self.latest.members
        return [f"{m.worker.site}/{m.worker.group}-{m.worker.index}" for m in members if m.revoked]

    def hear(self) -> None:
        """Take the next membership."""
        self.latest = next(self.call)


def hear_until(listener: Listener, names: list[str], began_s: float) -> float:
    """Seconds until that worker has heard that just these are revoked."""
    while listener.revoked() != names:
        listener.hear()
        assert time.monotonic() - began_s < WITHIN_S, listener.latest
    return time.monotonic() - began_s


def dlion(site: OperatedSite, *arguments: str) -> None:
    where = ["--kubeconfig", str(site.kubectl.kubeconfig), "-n", site.kubectl.namespace]
    assert main(["trust", *arguments, *where]) == 0


def test_a_revocation_reaches_all_sites_in_ten_seconds(
    three_sites: tuple[OperatedSite, OperatedSite, OperatedSite],
) -> None:
    a, b, c = three_sites
    document = manifest(sites=[{"name": each, "groups": GROUPS} for each in ALL_SITES])
    for site in three_sites:
        site.bundle_file.write_bytes(site.bundle())
        site.kubectl.apply(document)
    eventually("all is consistent", lambda: {s.consistent()[0] for s in three_sites} == {"True"})
    eventually("pods are made", lambda: all(len(site.pods()) == 1 for site in three_sites))
    document["metadata"]["namespace"] = a.kubectl.namespace
    job = load_job(document).with_group_ranks()
    by_name = {site.name: site for site in three_sites}
    workers = {worker.site: worker for worker in job.workers()}
    listeners = {
        name: Listener(by_name[name].join(worker, job.hash())) for name, worker in workers.items()
    }
    for listener in listeners.values():
        while len(listener.latest.members) < 3:
            listener.hear()

    began_s = time.monotonic()
    dlion(b, "revoke", "digits", "plant-b/small-0", "--reason", "stolen")
    for name in ("plant-a", "plant-c"):
        took_s = hear_until(listeners[name], ["plant-b/small-0"], began_s)
        print(f"a worker of {name} hears of it after {took_s:.1f} s")
    list(listeners["plant-b"].call)  # its stream ends
    with pytest.raises(grpc.RpcError) as refused:
        b.join(workers[b.name], job.hash())  # type: ignore[index]
    assert dict(refused.value.trailing_metadata() or ())["dlion-reason"] == "Revoked"

    def statuses() -> list[list[tuple[str, str, bool]]]:
        found = [site.status().get("revoked") or [] for site in three_sites]
        return [[(e["name"], e["by"], e["effective"]) for e in each] for each in found]

    own = ("plant-b/small-0", "plant-b", True)
    eventually("every status has it", lambda: statuses() == [[own]] * 3)
    assert b.kubectl.get("dlj", "digits")["status"]["revoked"][0]["reason"] == "stolen"
    events = b.kubectl.get("events", "--field-selector=reason=WorkerRevoked")["items"]
    assert len(events) == 1

    _another_site_decides_for_itself(three_sites, listeners, statuses, own)
    for site in (b, c):
        site.operator.kill()
        site.operator.start()
    eventually("it is kept", lambda: statuses()[1:] == [[own]] * 2)

    began_s = time.monotonic()
    dlion(b, "restore", "digits", "plant-b/small-0")
    hear_until(listeners["plant-a"], [], began_s)
    eventually("it is lifted everywhere", lambda: statuses() == [[]] * 3)
    again = replace(workers[b.name])  # type: ignore[index]
    Listener(b.join(again, job.hash())).joined.channel.close()
    for listener in listeners.values():
        listener.joined.channel.close()


def _another_site_decides_for_itself(
    three_sites: tuple[OperatedSite, OperatedSite, OperatedSite],
    listeners: dict[Any, Listener],
    statuses: Callable[[], Any],
    own: tuple[str, str, bool],
) -> None:
    a, _, c = three_sites
    began_s = time.monotonic()
    dlion(a, "revoke", "digits", "plant-c")
    hear_until(listeners["plant-a"], ["plant-b/small-0", "plant-c/small-0"], began_s)
    there, elsewhere = ("plant-c", "plant-a", True), ("plant-c", "plant-a", False)
    eventually(
        "the others show it",
        lambda: statuses() == [[own, there], [own, elsewhere], [own, elsewhere]],
    )
    assert listeners["plant-c"].revoked() == ["plant-b/small-0"]
    annotation = json.dumps([{"name": "../x"}, {"name": "plant-c"}])
    a.kubectl.run("annotate", "dlj", "digits", "--overwrite", f"{REVOKED_ANNOTATION}={annotation}")
    message = "annotation dlion.dev/revoked"
    eventually(
        "what is wrong is in the status",
        lambda: any(message in str(e.get("message")) for e in a.status().get("conditions") or ()),
    )
    assert statuses()[0] == [own, there]
    a.kubectl.run("annotate", "dlj", "digits", f"{REVOKED_ANNOTATION}-")
    eventually("it is lifted", lambda: statuses() == [[own]] * 3)
    assert c.status().get("revoked")
