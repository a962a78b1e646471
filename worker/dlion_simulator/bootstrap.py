"""What a worker's sidecar knows before its first step: peers, quota, speed and links.

Replaces real probes: their results follow from the costs and the environment. Called by `churn`
when workers start.
"""

from __future__ import annotations

from dlion_api.names import Rank
from dlion_api.protocol.measurements import CpuAllowance, Peers, SpeedProbe
from dlion_api.protocol.membership import Membership
from dlion_environments.plan import Conditions
from dlion_simulator.context import WorkerParts

PROBE_CORE_S = 1.0
"""Measurement before the first step. It takes no virtual time, which begins with training."""

PROBE_BYTES = 2**20

MAX_PROBE_BYTES_PER_S = 1.25e9
"""Probe result on a link without a limit."""


def send_membership(parts: WorkerParts, membership: Membership, now_s: float) -> None:
    """Send the sidecar the members and the size of the data."""
    parts.director.handle(
        Peers(membership, parts.training_set_samples, parts.stream.samples), now_s
    )


def connect_sidecar(parts: WorkerParts, membership: Membership, now_s: float) -> None:
    """Connect a trainer to its sidecar."""
    parts.director.trainer_started()
    send_membership(parts, membership, now_s)
    parts.director.handle(CpuAllowance(parts.units, 0.0, 0.0), now_s)


def probe_link(parts: WorkerParts, peer: Rank, bytes_per_s: float, now_s: float) -> None:
    """Report the probed rate of a link whose rate is unknown."""
    known = peer in parts.director.links.bandwidths()
    if not known and 0 < bytes_per_s < float("inf"):
        parts.director.probed(peer, PROBE_BYTES, PROBE_BYTES / bytes_per_s, now_s)


def probe_pairs(parts: WorkerParts, conditions: Conditions, now_s: float) -> None:
    """If groups depend on link rates: run the due probes and update the grouping."""
    director = parts.director
    if director.grouping is None:
        return
    while (member := director.link_to_probe(now_s)) is not None:
        peer = member.identity.rank
        bytes_per_s = min(MAX_PROBE_BYTES_PER_S, conditions.link_bytes_per_s(parts.rank, peer))
        if bytes_per_s > 0:
            director.probed(peer, PROBE_BYTES, PROBE_BYTES / bytes_per_s, now_s)
    director.regroup_if_due(now_s)


def probe_speed(parts: WorkerParts, now_s: float) -> None:
    """Report the speed measured by discarded gradients before the first step."""
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
