"""Plans of environments with sites, for tests of resources that a site's workers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlion_api.document import parse
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.model import Environment

if TYPE_CHECKING:
    from dlion_environments.plan import Plan


def plan_of_sites(letters: str, between_mbit_per_s: float | None, **fields: Any) -> Plan:
    """A worker for each letter, which names its site; `fields` are others of the environment."""
    document = {
        "name": "test",
        "workers": [{"count": len(letters), "cores": 1}],
        "betweenSites": {"mbitPerS": between_mbit_per_s},
        **fields,
    }
    sites = enumerate(letters)
    workers = tuple(WorkerIdentity(Rank(k), SiteName(site), "g", k) for k, site in sites)
    return parse(Environment, document).plan(workers, None)
