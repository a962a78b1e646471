"""`spec.nodePolicies`: what workers owe to the machines that they run on."""

from dataclasses import dataclass
from typing import Literal

from dlion_api.document import optional, setting


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A temperature that a worker's machine should stay below at least 94 % of the time."""

    threshold_celsius: float = setting(
        "of the hottest sensor that the worker's sidecar can read; some kelvins below where the"
        " hardware throttles.",
        above=0,
        maximum=150,
        unit="°C",
    )
    min_compute_share: float = setting(
        "least share of the time in which a worker may compute, however hot it is.",
        default=0.1,
        minimum=0.01,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How a worker follows what other work takes from its machine's processors."""

    prediction: Literal["auto", "none"] = setting(
        "auto: its part of the batch follows forecasts, where they have been better than the"
        " measured speed; none: the measured speed alone.",
        default="auto",
    )


@dataclass(frozen=True, kw_only=True)
class NodePolicies:
    """What workers owe to the machines that they run on."""

    heat: Heat | None = optional(
        "limits the compute of each worker whose machine would become too hot; default: no limit.",
    )
    demand: Demand = setting(
        "how each worker follows what other work takes from its machine's processors.",
        default=Demand(),
    )
