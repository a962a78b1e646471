"""Files on the nodes of a testbed's site, and a claim with which pods there read them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from testbed.sites import Site

SIZE = {"storage": "1Gi"}


def bring_files(site: Site, files: Iterable[Path], *, claim: str, namespace: str) -> None:
    """Copy them to every node's disk; in that existing namespace, `claim` holds them."""
    kept = list(files)
    for node in site.nodes:
        folder = node.machine.folder / "lib" / claim
        folder.mkdir(exist_ok=True)
        for file in kept:
            shutil.copyfile(file, folder / file.name)
    names = [node.layout.name for node in site.nodes]
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": names}
    terms = [{"matchExpressions": [there]}]
    shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = f"{namespace}-{claim}"
    site.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": shared
            | {
                "capacity": SIZE,
                "local": {"path": f"/var/lib/{claim}"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": shared | {"volumeName": volume, "resources": {"requests": SIZE}},
        },
    )
