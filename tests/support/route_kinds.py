"""The kinds that route gateways to workers, as their projects define them.

They are the Gateway API's TLSRoute and Gateway, in the oldest release that the chart supports, and
Traefik's IngressRouteTCP. The definitions are files of the projects' Go modules, which Go checks
against its checksum database. They are kept in the testbed's cache.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.binaries import build_once, cache_folder, go
from trained_jobs import eventually

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

GATEWAY_API, TRAEFIK = "v1.5.0", "v3.7.13"
_STANDARD = "config/crd/standard/gateway.networking.k8s.io"
_FILES = {
    f"sigs.k8s.io/gateway-api@{GATEWAY_API}": (
        f"{_STANDARD}_gateways.yaml",
        f"{_STANDARD}_tlsroutes.yaml",
    ),
    f"github.com/traefik/traefik/v3@{TRAEFIK}": (
        "docs/content/reference/dynamic-configuration/traefik.io_ingressroutetcps.yaml",
    ),
}


def build() -> Path:
    """Return the folder of the definitions; fill it if needed (seconds).

    Raises: UnavailableError with the end of Go's output.
    """
    folder = cache_folder() / f"route-kinds-{GATEWAY_API}-{TRAEFIK}"
    build_once(folder, _make)
    return folder


def _make(folder: Path) -> None:
    for module, files in _FILES.items():
        source = json.loads(go("mod", "download", "-json", module, module=folder))["Dir"]
        for name in files:
            shutil.copyfile(Path(source) / name, folder / Path(name).name)


def install(kubectl: Kubectl) -> None:
    """Add the kinds to the API server. Raises: UnavailableError if it refuses one."""
    files = [f"--filename={path}" for path in sorted(build().glob("*.yaml"))]
    kubectl.run("apply", "--server-side", *files)
    for plural in ("gateways", "tlsroutes", "ingressroutetcps"):
        eventually(partial(kubectl.knows, plural), within_s=30, what=f"{plural} served")
