"""Whether a run is too short for one exchange over the slowest link of its environment.

Only for policies whose messages are a whole gradient or model, so that their size is known before
the run. All others send what fits a link, or a part that depends on the values.
"""

from collections.abc import Mapping
from typing import Final

from dlion_api.reasons import EventReason
from dlion_api.spec import Exchange, Job, Spec
from dlion_core.codecs import Coding, ValueCodec, coded_bytes
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.topology.topology import CLUSTERED, neighbours_of
from dlion_environments.plan import BYTES_PER_MBIT, Plan

_WHOLE_GRADIENTS: Final = frozenset({"async", "full"})
_WHOLE_WEIGHTS: Final = frozenset({"adpsgd", "d2", "hop", "localsgd"})
_WITHOUT_SELECTION: Final = frozenset({"dlion", "dlion-published"})
"""Policies that send whole gradients if prioritisation is off."""


def slowest_link(job: Job, plan: Plan) -> Mapping[str, float]:
    """Name and bytes/s of the job's slowest link while all others are idle.

    A link counts with its highest rate of the run. Empty: every rate is unlimited, or no exchange
    of the job has a known size.
    """
    if job.spec.trainer.stop.max_seconds is None or _whole_coding(job.spec.exchange) is None:
        return {}
    name, least = "", float("inf")
    for worker in job.workers():
        for peer in neighbours_of(job, worker.rank):
            fastest = 0.0
            for conditions in (plan.initial, *(change.conditions for change in plan.changes)):
                fastest = max(fastest, conditions.link_bytes_per_s(worker.rank, peer))
                if fastest >= least:
                    break
            if 0 < fastest < least:
                name, least = f"{worker.name} → {job.worker(peer).name}", fastest
    return {name: least} if name else {}


def report_slow_exchange(
    spec: Spec, size: int, link: Mapping[str, float], reporter: Reporter
) -> None:
    """Report, before the first step, that no exchange over that link ends within the run.

    `size`: trained entries of the model. `link`: of `slowest_link`.
    """
    if warning := slow_exchange(spec, size, link):
        reporter.event(EventReason.EXCHANGE_TOO_LONG, warning, warning=True)


def slow_exchange(spec: Spec, size: int, link: Mapping[str, float]) -> str:
    """The warning if an exchange over that link takes longer than the run; empty if it does not.

    Arguments as of `report_slow_exchange`.
    """
    limit_s, coding = spec.trainer.stop.max_seconds, _whole_coding(spec.exchange)
    if limit_s is None or coding is None:
        return ""
    message_bytes = coded_bytes(size, size, coding)
    for name, bytes_per_s in link.items():
        if (seconds := message_bytes / bytes_per_s) > limit_s:
            return (
                f"one exchange of policy {spec.exchange.policy} has {message_bytes / 1e6:.3g} MB. "
                f"Link {name} ({bytes_per_s / BYTES_PER_MBIT:.3g} Mbit/s) takes {seconds:.0f} s "
                f"for it, longer than the run: {limit_s:g} s (trainer.stop.maxSeconds). "
                "So the workers at its ends wait for it beyond that limit or, if they are "
                "asynchronous, train without each other. Choose a policy with fewer bytes "
                f"(exchange.policy: {Exchange().policy}), or raise trainer.stop.maxSeconds"
            )
    return ""


def _whole_coding(exchange: Exchange) -> Coding | None:
    """The encoding of a whole gradient or model; None if messages may be shorter, or if workers may
    not use some links."""
    coding = Coding(ValueCodec(exchange.codec))
    has_server = exchange.parameters.get("server") is not None
    if has_server or exchange.topology == CLUSTERED or coding.values is ValueCodec.POLYLINE:
        return None
    is_whole = exchange.policy in _WITHOUT_SELECTION and not exchange.prioritization
    if exchange.policy in _WHOLE_GRADIENTS or (is_whole and exchange.propagation == "all"):
        return coding
    return coding.for_weights if exchange.policy in _WHOLE_WEIGHTS else None
