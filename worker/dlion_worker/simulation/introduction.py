"""What a worker's sidecar knows before its first step: peers, quota, speed and links.

Owns what stands in for probes: their outcome follows from the costs and the environment. Called by
`roster` when workers begin or come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.measurements import CpuAllowance, Peers, SpeedProbe

if TYPE_CHECKING:
    from dlion_api.membership import Membership
    from dlion_api.names import Rank
    from dlion_worker.environments.plan import Conditions
    from dlion_worker.simulation.surroundings import WorkerParts

PROBE_CORE_S = 1.0
"""Of measuring before the first step; outside virtual time, which begins with training."""

PROBE_BYTES = 2**20

FASTEST_BYTES_PER_S = 1.25e9
"""What a probe finds on a link without a limit."""


def tell_membership(parts: WorkerParts, membership: Membership, now_s: float) -> None:
    """Who takes part, and how much data there is."""
    parts.director.handle(
        Peers(membership, parts.training_set_samples, parts.stream.samples), now_s
    )


def introduce(parts: WorkerParts, membership: Membership, now_s: float) -> None:
    """A trainer connects to its sidecar."""
    parts.director.trainer_started()
    tell_membership(parts, membership, now_s)
    parts.director.handle(CpuAllowance(parts.units, 0.0, 0.0), now_s)


def probe_link(parts: WorkerParts, peer: Rank, bytes_per_s: float, now_s: float) -> None:
    """What a probe finds out about a link of which nothing is known."""
    known = peer in parts.director.links.bandwidths()
    if not known and 0 < bytes_per_s < float("inf"):
        parts.director.probed(peer, PROBE_BYTES, PROBE_BYTES / bytes_per_s, now_s)


def probe_pairs(parts: WorkerParts, conditions: Conditions, now_s: float) -> None:
    """Where groups go by what links carry: probes that are due, and a look at their outcome."""
    director = parts.director
    if director.grouping is None:
        return
    while (member := director.link_to_probe(now_s)) is not None:
        peer = member.identity.rank
        bytes_per_s = min(FASTEST_BYTES_PER_S, conditions.link_bytes_per_s(parts.rank, peer))
        if bytes_per_s > 0:
            director.probed(peer, PROBE_BYTES, PROBE_BYTES / bytes_per_s, now_s)
    director.look(now_s)


def probe_speed(parts: WorkerParts, now_s: float) -> None:
    """What gradients that are thrown away find out before the first step."""
    samples = max(1, parts.job.spec.batching.global_batch_size.initial // 4)
    cost_s = parts.costs.core_s(samples)
    repeated = max(1, round(PROBE_CORE_S / cost_s))
    parts.director.handle(
        SpeedProbe(
            samples=repeated * samples,
            compute_s=repeated * cost_s / parts.units,
            cpu_s=repeated * cost_s,
            throttled_s=0.0,
            quota_cores=parts.units,
            largest_batch=samples,
        ),
        now_s,
    )
