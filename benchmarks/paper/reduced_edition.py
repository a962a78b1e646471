"""The comparisons with much smaller networks and links that are slower in proportion.

In virtual time a whole gradient takes as long on its link, and a sample as long to compute, as with
the published network. Only the network learns less from a sample. So the systems have the same
trade-off between computing and sending. Runs last half as long in virtual time, with a lower
target; on MNIST, whose network is the cheapest, as long. Comparisons with small networks are
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from comparison import CIFAR10, HERE, MNIST, SLIDES, Comparison, environment
from published import ADAPTIVE, MOBILENET

from dlion_api.atomic_file import write_atomically
from dlion_api.document import to_document
from dlion_environments.loading import load_environment
from dlion_environments.plan import MESSAGE_OVERHEAD_BYTES

NAME = "reduced"


@dataclass(frozen=True)
class Network:
    """The substitute for the network of a comparison."""

    program: Path
    parameters: int
    replaced: int
    """Parameters of the published one: `cipher`, `cnn17`, `mobilenet`."""

    @property
    def factor(self) -> float:
        """Return the factor for every link's rate."""
        return self.parameters / self.replaced


_CIFAR10, _MNIST = (HERE / NAME / f"{name}.py" for name in ("cifar10", "mnist"))
NETWORKS: Mapping[Path, Network] = {
    CIFAR10: Network(_CIFAR10, 39_178, 1_147_466),
    SLIDES: Network(_CIFAR10, 39_178, 4_224_970),
    MNIST: Network(_MNIST, 101_770, 1_146_890),
}
"""Networks by manifest."""
IN_MOBILENETS_PLACE = Network(_CIFAR10, 39_178, 3_239_114)

TIME = 0.5
TIMES: Mapping[str, float] = {
    **dict.fromkeys(("systems", "recent", "served", "gpu"), 1 / 3),
    **dict.fromkeys(("slides", "recent-slides", "served-slides"), 1 / 6),
    **dict.fromkeys(("adacomp", "two-step"), 1.0),
}
"""Share of the published virtual time; TIMES has that of some parts. For systems it is about eight
times the ideal's time to the target."""

EVALUATION = "trainer.evaluation.everySamples=5000"
"""For systems: the time between two evaluations is less than a quarter of the ideal's time."""

TARGET = 0.35
TARGETS: Mapping[str, float] = {"fedat": 0.15, "adacomp": 0.95, "two-step": 0.9}
"""Mean accuracy over replicas in place of the published one; TARGETS has that of some parts.
Between two rounds of `fedat` each replica moves towards its own labels: their mean accuracy is
about half that of the averaged model, and about 15 % is the maximum that all columns reach."""

_RATES = ("mbitPerS", "uplinkMbitPerS", "downlinkMbitPerS", "betweenSitesMbitPerS")


@dataclass(frozen=True)
class Reduction:
    """Makes comparisons smaller; environments with slower links are written into a folder."""

    folder: Path

    def of(self, comparison: Comparison) -> Comparison:
        """Return the same comparison with the small network."""
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
        """Write the environment with every rate times the factor; return the file.

        With `overhead` the bytes of messages beside their payload are scaled, too.
        """
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
    """Return the document with every rate of a link times the factor, in Mbit/s to six digits."""
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
