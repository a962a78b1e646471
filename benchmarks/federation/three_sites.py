"""Measure one job over three real clusters: accuracy, traffic, and the cost of faults.

    python benchmarks/federation/three_sites.py --data ../shared/data/cifar10 [--seeds 5]
    python benchmarks/federation/three_sites.py --data DIR --only cut isolated lost operators
    python benchmarks/federation/three_sites.py --data DIR --only cluster      no clusters, no root
    python benchmarks/federation/three_sites.py --data DIR --report -o json    measure nothing

Run as root, on the testbed (tests/support/testbed): three clusters, with links of 50, 35 and 20
Mbit/s between them. The chart is installed and the bundles are exchanged as docs/several-sites.md
describes, and `job.yaml` is submitted at each. `cipher` learns CIFAR-10 in real pods of 0.7, 0.5
and 0.35 core.

    links      the rate of each link by `dlion preflight --bandwidth`
    train      three epochs, with every site's status
    alone      the same machines at the same time, each alone
    cluster    the same job in one cluster, simulated
    cut        the link between two sites cut for 60 s
    isolated   one site cut off from both others for 60 s, with minSites 2
    lost       one whole site killed and brought back
    operators  all operators stopped for two minutes

Each part runs once for each seed, one seed after the other. Its results stay in OUT, with the logs
of all pods. The same command resumes after an interrupt, at a later commit, too, while manifest and
exposure are the same. It prints a table of bars with the commit of each. Exit code 1 if one is
missed or a part is missing. The testbed is removed with the command, also on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "support")]

import faults  # noqa: E402
import undisturbed  # noqa: E402
import yaml  # noqa: E402
from federated_sites import MBIT_PER_S, Document, FederatedSites, federated  # noqa: E402
from federated_training import Setting  # noqa: E402
from links import links  # noqa: E402
from measured import Measured  # noqa: E402
from one_cluster import one_cluster  # noqa: E402
from pairs import SIMULATED, pairs  # noqa: E402

REAL: dict[str, Callable[[Setting], Measured]] = {
    "links": links,
    "train": undisturbed.train,
    "alone": undisturbed.alone,
    "cut": faults.cut,
    "isolated": faults.isolated,
    "lost": faults.lost,
    "operators": faults.operators,
}
PARTS = ("links", "train", "alone", SIMULATED, "cut", "isolated", "lost", "operators")


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)
    manifest = yaml.safe_load((HERE / "job.yaml").read_text())
    manifest["spec"]["network"]["exposure"] = arguments.exposure
    planned = _planned(arguments, manifest)
    if not arguments.report:
        _measure(arguments, [part for part in planned if part.found() is None])
    found = {part.folder.name: part.found() for part in planned}
    there = {name: measured for name, measured in found.items() if measured is not None}
    return max(_report(there, arguments), int(len(there) < len(found)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--only", nargs="*", choices=PARTS, help="parts, in the order given")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each part")
    parser.add_argument("--exposure", choices=["PodNetwork", "NodePort"], default="PodNetwork")
    parser.add_argument("--threads", type=int, default=2, help="of the simulation")
    parser.add_argument("--out", type=Path, default=Path("runs/three-sites"))
    parser.add_argument("--report", action="store_true", help="only what was measured before")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    arguments = parser.parse_args()
    missing = [name for name in ("train.tfrecord", "test.tfrecord")
               if not (arguments.data / name).is_file()]  # fmt: skip
    if missing:
        parser.error(f"--data {arguments.data}: no {' and no '.join(missing)} there")
    return arguments


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Planned:
    """One part with one seed."""

    part: str
    manifest: Document
    folder: Path

    def found(self) -> Measured | None:
        """Return its results with this manifest, if it ran."""
        return Measured.load(self.folder, self.manifest)


def _planned(arguments: argparse.Namespace, manifest: Document) -> list[Planned]:
    """Return the requested parts with every seed, all parts of a seed before the next."""
    planned = []
    for seed in range(1, arguments.seeds + 1):
        seeded = copy.deepcopy(manifest)
        seeded["spec"]["trainer"]["seed"] = seed
        planned += [
            Planned(part, seeded, arguments.out / f"{part}-{seed}")
            for part in arguments.only or PARTS
        ]
    return planned


def _measure(arguments: argparse.Namespace, planned: list[Planned]) -> None:
    for each in planned:
        each.folder.mkdir(parents=True, exist_ok=True)
    real = [each for each in planned if each.part in REAL]
    if real:
        with tempfile.TemporaryDirectory(prefix="dlion-sites-") as made:
            print("starting three sites", file=sys.stderr, flush=True)
            with federated(arguments.data, Path(made), exposure=arguments.exposure) as sites:
                for each in real:
                    _measure_one(each, sites)
    for each in planned:
        if each.part == SIMULATED:
            print(f"{each.folder.name} ...", file=sys.stderr, flush=True)
            data = arguments.data.resolve()
            found = one_cluster(each.manifest, data, each.folder, arguments.threads)
            found.save(each.folder, each.manifest)


def _measure_one(planned: Planned, sites: FederatedSites) -> None:
    """Measure one part; report its failure, so that the others can still be measured."""
    name = planned.folder.name
    print(f"{name} ...", file=sys.stderr, flush=True)
    setting = Setting(sites, copy.deepcopy(planned.manifest), planned.folder)
    try:
        REAL[planned.part](setting).save(planned.folder, planned.manifest)
    except Exception:  # noqa: BLE001 - any error is printed completely
        traceback.print_exc()
        print(f"{name} failed: see {planned.folder}", file=sys.stderr, flush=True)


def _report(found: dict[str, Measured], arguments: argparse.Namespace) -> int:
    """Print all results; return the exit code."""
    together = list(pairs(found))
    rows = [(name, each.commit, bar) for name, each in found.items() for bar in each.bars]
    commits = ", ".join(sorted({each.commit for each in found.values()}))
    rows += [("train", commits, bar) for bar in together]
    missed = [bar for _, _, bar in rows if not bar.met]
    if arguments.output == "json":
        document = {
            "mbitPerS": MBIT_PER_S,
            "exposure": arguments.exposure,
            "parts": [asdict(each) for each in found.values()],
            "together": [asdict(bar) for bar in together],
        }
        print(json.dumps(document, indent=1))
        return int(bool(missed))
    print("| part | commit | what must be shown | measured | |\n|---|---|---|---|---|")
    for name, commit, bar in rows:
        verdict = "met" if bar.met else "**missed**"
        print(f"| {name} | {commit} | {bar.what} | {bar.measured} | {verdict} |")
    for name, each in found.items():
        print(f"\n{name}, {each.commit}, load average {each.load_average:.1f}")
        print(json.dumps(_short(each), indent=1))
    return int(bool(missed))


def _short(measured: Measured) -> Document:
    """Return figures without whole statuses."""
    return {name: value for name, value in measured.figures.items() if name != "at_the_end"}


if __name__ == "__main__":
    sys.exit(main())
