"""`spec.nodePolicies`: how workers respect other needs of their machines."""

from dataclasses import dataclass
from typing import Literal

from dlion_api.document import optional, setting


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A temperature that a worker's machine should stay below at least 94 % of the time."""

    threshold_celsius: float = setting(
        "limit for the hottest sensor that the sidecar can read. Set it some kelvins below the"
        " temperature at which the hardware throttles.",
        above=0,
        maximum=150,
        unit="°C",
    )
    min_compute_share: float = setting(
        "minimum share of the time for computing, however hot the machine is.",
        default=0.1,
        minimum=0.01,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How a worker follows what other work takes from its machine's processors."""

    prediction: Literal["auto", "none"] = setting(
        "auto: batches follow the forecast speed while forecasts save waiting; none: they follow"
        " the measured speed.",
        default="auto",
    )


@dataclass(frozen=True, kw_only=True)
class NodePolicies:
    """What workers owe to the machines that they run on."""

    heat: Heat | None = optional(
        "limits the compute of workers whose machine would become too hot.",
    )
    demand: Demand = setting(
        "how workers follow other work on their machines.",
        default=Demand(),
    )
