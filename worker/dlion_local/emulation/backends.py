"""Selects the backends that emulate an environment on this machine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from dlion_local.emulation.compute.quotas import control_groups_unavailable
from dlion_local.emulation.network.namespaces import namespaces_unavailable

if TYPE_CHECKING:
    from dlion_environments.plan import Plan


class LinkBackend(StrEnum):
    """How link rates are enforced."""

    NAMESPACES = "namespaces"
    RELAY = "relay"
    NONE = "none"


class CpuBackend(StrEnum):
    """How CPU quotas are enforced."""

    CONTROL_GROUP = "controlGroup"
    DUTY_CYCLE = "dutyCycle"
    NONE = "none"


def choose_link_backend(plan: Plan, privileged: bool | None) -> tuple[LinkBackend, str]:
    """Return the backend for links, and the reason for the choice."""
    if not plan.shapes_links:
        return LinkBackend.NONE, "the environment limits no link"
    if privileged is False:
        return LinkBackend.RELAY, "requested to run without root's features"
    unavailable = namespaces_unavailable()
    if privileged is None and plan.asks_for_latency:
        return LinkBackend.RELAY, "latency is asked for, which only the relay imposes"
    if unavailable and privileged is None:
        return LinkBackend.RELAY, unavailable
    return LinkBackend.NAMESPACES, "network namespaces with htb rates"


def choose_cpu_backend(plan: Plan, privileged: bool | None) -> tuple[CpuBackend, str]:
    """Return the backend for CPU quotas, and the reason for the choice."""
    if not plan.limits_cpu:
        return CpuBackend.NONE, "the environment limits no CPU"
    if privileged is False:
        return CpuBackend.DUTY_CYCLE, "requested to run without root's features"
    unavailable = control_groups_unavailable()
    if unavailable:
        return CpuBackend.DUTY_CYCLE, unavailable
    return CpuBackend.CONTROL_GROUP, "hard quota of the cpu controller"
