"""Compare `dlion preflight --bandwidth` with links whose rates are known."""

from __future__ import annotations

import json
from itertools import permutations

from federated_sites import MBIT_PER_S
from federated_training import Setting
from measured import Bar, Measured

OFF_BY = 0.15
"""The part of a rate for frames, TLS and the burst of a shaper."""


def links(setting: Setting) -> Measured:
    """Measure each link in each direction, one after the other, without a job."""
    contexts = ",".join(setting.sites.names)
    output = setting.sites.dlion(
        "preflight", str(setting.sites.listed), "--contexts", contexts, "--bandwidth", "-o", "json"
    )
    (setting.out / "preflight.json").write_text(output)
    found = {
        each["site"]: each["figures"]
        for each in json.loads(output)["checks"]
        if each["check"] == "bandwidth"
    }
    rates = {
        f"{one} to {other}": {
            "imposed_mbit_per_s": min(MBIT_PER_S[one], MBIT_PER_S[other]),
            "found_mbit_per_s": found[one].get(f"{other}_mbit_per_s"),
        }
        for one, other in permutations(setting.sites.names, 2)
    }
    ratios = [
        each["found_mbit_per_s"] / each["imposed_mbit_per_s"]
        for each in rates.values()
        if each["found_mbit_per_s"]
    ]
    is_near = len(ratios) == len(rates) and all(abs(ratio - 1) <= OFF_BY for ratio in ratios)
    words = f"{min(ratios):.2f} to {max(ratios):.2f} of it" if ratios else "none"
    what = f"the rate of each link in each direction is found within {OFF_BY:.0%}"
    bar = Bar(what, f"{words}, {len(ratios)} of {len(rates)}", is_near)
    return Measured(setting.out.name, {"links": rates}, [bar])
