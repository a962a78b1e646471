"""The comparisons with networks that cost a fraction, and links slower in proportion.

A whole gradient takes as long on its way, and a sample as long to compute (in virtual time), as
with the published network; only what is learnt from a sample is less. So the systems stand in the
same trade between computing and sending. Runs last half as long in virtual time, to a lower
target; on MNIST, where the network is the cheapest by far, as long. What has a small network anyway
is as it is at full size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from published import (
    ADAPTIVE,
    CIFAR10,
    HERE,
    MNIST,
    MOBILENET,
    SLIDES,
    Comparison,
    environment,
)

from dlion_api.atomic_file import write_atomically
from dlion_api.document import to_document
from dlion_environments.loading import load_environment
from dlion_environments.plan import MESSAGE_OVERHEAD_BYTES

NAME = "reduced"


@dataclass(frozen=True)
class Network:
    """What stands for the network of a comparison."""

    program: Path
    parameters: int
    replaced: int
    """Parameters of the published one: `cipher`, `cnn17`, `mobilenet`."""

    @property
    def factor(self) -> float:
        """Of every link's rate."""
        return self.parameters / self.replaced


_CIFAR10, _MNIST = (HERE / NAME / f"{name}.py" for name in ("cifar10", "mnist"))
NETWORKS: Mapping[Path, Network] = {
    CIFAR10: Network(_CIFAR10, 39_178, 1_147_466),
    SLIDES: Network(_CIFAR10, 39_178, 4_224_970),
    MNIST: Network(_MNIST, 101_770, 1_146_890),
}
"""By the manifest."""
IN_MOBILENETS_PLACE = Network(_CIFAR10, 39_178, 3_239_114)

TIME = 0.5
TIMES: Mapping[str, float] = {
    **dict.fromkeys(("systems", "recent", "served", "gpu"), 1 / 3),
    **dict.fromkeys(("slides", "recent-slides", "served-slides"), 1 / 6),
    "adacomp": 1.0,
}
"""Of the published virtual time; of parts that TIMES names, that: of systems about eight times what
the ideal takes to the target."""

EVALUATION = "trainer.evaluation.everySamples=5000"
"""Of systems: between two evaluations less than a quarter of the ideal's time passes."""

TARGET = 0.35
TARGETS: Mapping[str, float] = {"fedat": 0.15, "adacomp": 0.95}
"""Mean accuracy over replicas that stands for the published one; of parts that TARGETS names, that.
Between two rounds of `fedat` each replica has moved towards its own labels: their mean accuracy is
about half that of the averaged model, and 15 % is about the most that all columns come to."""

_RATES = ("mbitPerS", "uplinkMbitPerS", "downlinkMbitPerS", "betweenSitesMbitPerS")


@dataclass(frozen=True)
class Reduction:
    """Makes comparisons smaller; environments with slower links are written into a folder."""

    folder: Path

    def of(self, comparison: Comparison) -> Comparison:
        """The same in small."""
        network = NETWORKS.get(comparison.file)
        if network is None:
            return comparison
        if MOBILENET in comparison.settings:
            network = IN_MOBILENETS_PLACE
        names = {*comparison.environments, *filter(None, [comparison.tuned_in])}
        is_scaled = comparison.columns.keys() >= {ADAPTIVE}
        places = {
            name: self._slowed(name, network.factor, overhead=is_scaled) for name in sorted(names)
        }
        program = f"trainer.program={{file: {network.program.relative_to(HERE)}}}"
        return replace(
            comparison,
            settings=(
                program,
                *((EVALUATION,) if comparison.columns.keys() >= {ADAPTIVE} else ()),
                *(one for one in comparison.settings if one != MOBILENET),
            ),
            environments=tuple(places[name] for name in comparison.environments),
            tuned_in=places.get(comparison.tuned_in, ""),
            target=TARGETS.get(comparison.part, TARGET),
            seconds=round(TIMES.get(comparison.part, TIME) * comparison.seconds),
        )

    def _slowed(self, name: str, factor: float, *, overhead: bool) -> str:
        """The file of that environment with every rate times the factor; what messages take beside
        their payload, too, if `overhead`."""
        document = slowed(to_document(load_environment(environment(name))), factor)
        kind = f"{factor:.4f}"
        if overhead:
            document["messageOverheadBytes"] = max(1, round(factor * MESSAGE_OVERHEAD_BYTES))
            kind += "-messages"
        path = self.folder / kind / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, yaml.safe_dump(document, sort_keys=False).encode(), mode=0o644)
        return str(path)


def slowed(node: Any, factor: float) -> Any:
    """The document with every rate of a link times the factor, in Mbit/s to six digits."""
    if isinstance(node, dict):
        return {
            key: _times(value, factor) if key in _RATES else slowed(value, factor)
            for key, value in node.items()
        }
    return [slowed(one, factor) for one in node] if isinstance(node, list) else node


def _times(rate: Any, factor: float) -> Any:
    if isinstance(rate, list):
        return [_times(one, factor) for one in rate]
    return None if rate is None else float(f"{rate * factor:.6g}")
