"""By which means an environment is imposed on this machine, and why by these.

Called by `local.imposed`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from dlion_worker.local.namespaces import namespaces_unavailable
from dlion_worker.local.quotas import control_groups_unavailable

if TYPE_CHECKING:
    from dlion_worker.environments.plan import Plan


class LinkMeans(StrEnum):
    """How links are shaped."""

    NAMESPACES = "namespaces"
    RELAY = "relay"
    NONE = "none"


class CpuMeans(StrEnum):
    """How CPU is held."""

    CONTROL_GROUP = "controlGroup"
    DUTY_CYCLE = "dutyCycle"
    NONE = "none"


def choose_link_means(plan: Plan, privileged: bool | None) -> tuple[LinkMeans, str]:
    """How links are to be shaped, and why so."""
    if not plan.shapes_links:
        return LinkMeans.NONE, "the environment limits no link"
    if privileged is False:
        return LinkMeans.RELAY, "asked to run without root's means"
    unavailable = namespaces_unavailable()
    if privileged is None and plan.asks_for_latency:
        return LinkMeans.RELAY, "latency is asked for, which only the relay imposes"
    if unavailable and privileged is None:
        return LinkMeans.RELAY, unavailable
    return LinkMeans.NAMESPACES, "network namespaces with htb rates"


def choose_cpu_means(plan: Plan, privileged: bool | None) -> tuple[CpuMeans, str]:
    """How CPU is to be held, and why so."""
    if not plan.limits_cpu:
        return CpuMeans.NONE, "the environment limits no CPU"
    if privileged is False:
        return CpuMeans.DUTY_CYCLE, "asked to run without root's means"
    unavailable = control_groups_unavailable()
    if unavailable:
        return CpuMeans.DUTY_CYCLE, unavailable
    return CpuMeans.CONTROL_GROUP, "hard quota of the cpu controller"
