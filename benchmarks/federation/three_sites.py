"""One job over three real clusters: what it learns, what it takes, and what faults cost it.

    python benchmarks/federation/three_sites.py --data ../shared/data/cifar10 [--seeds 5]
    python benchmarks/federation/three_sites.py --data DIR --only cut isolated lost operators
    python benchmarks/federation/three_sites.py --data DIR --only cluster      no clusters, no root
    python benchmarks/federation/three_sites.py --data DIR --report -o json    measure nothing

As root, on the testbed (tests/support/testbed): three clusters, links of 50, 35 and 20 Mbit/s
between them, the chart installed and the bundles exchanged as docs/several-sites.md says,
`job.yaml` submitted at each; `cipher` learns CIFAR-10 in real pods of 0.7, 0.5 and 0.35 core.

    train      three epochs, seen from every site's status; for each seed
    alone      the same machines at the same time, each by itself; for each seed
    cluster    the same job in one cluster, simulated; for each seed
    cut        the link between two sites cut for 60 s
    isolated   one site cut off from both others for 60 s, with minSites 2
    lost       one site killed as a whole, and brought back
    operators  all operators stopped for two minutes

What a part has found stays in OUT, with the logs of all pods; the same command goes on where it
was broken off. Prints a table of bars with the commit of each; exit code 1 where one is missed or
a part is not there. The testbed goes with the command, also on Ctrl-C and SIGTERM.
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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests" / "support")]

import faults  # noqa: E402
import undisturbed  # noqa: E402
import yaml  # noqa: E402
from federated_sites import MBIT_PER_S, Document, federated  # noqa: E402
from federated_training import Setting  # noqa: E402
from measured import Measured  # noqa: E402
from one_cluster import one_cluster  # noqa: E402
from pairs import SIMULATED, pairs  # noqa: E402

BY_SEED: dict[str, Callable[[Setting], Measured]] = {
    "train": undisturbed.train,
    "alone": undisturbed.alone,
}
ONCE: dict[str, Callable[[Setting], Measured]] = {
    "cut": faults.cut,
    "isolated": faults.isolated,
    "lost": faults.lost,
    "operators": faults.operators,
}


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)
    manifest = yaml.safe_load((HERE / "job.yaml").read_text())
    manifest["spec"]["network"]["exposure"] = arguments.exposure
    folders = _folders(arguments)
    if not arguments.report:
        _measure(arguments, manifest, {
            name: folder for name, folder in folders.items() if Measured.load(folder) is None
        })  # fmt: skip
    found = {name: Measured.load(folder) for name, folder in folders.items()}
    there = {name: measured for name, measured in found.items() if measured is not None}
    return max(_report(there, arguments), int(len(there) < len(found)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument(
        "--only", nargs="*", choices=[*BY_SEED, SIMULATED, *ONCE], help="parts, in the order given"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of train, alone and cluster")
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


def _folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """Of each part that is asked for, by its name; parts of several seeds have one for each."""
    names: list[str] = []
    for part in arguments.only or [*BY_SEED, SIMULATED, *ONCE]:
        seeds = range(1, arguments.seeds + 1)
        names += [part] if part in ONCE else [f"{part}-{seed}" for seed in seeds]
    return {name: arguments.out / name for name in names}


def _measure(arguments: argparse.Namespace, manifest: Document, folders: dict[str, Path]) -> None:
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    simulated = [name for name in folders if name.startswith(SIMULATED)]
    real = [name for name in folders if name not in simulated]
    if real:
        with tempfile.TemporaryDirectory(prefix="dlion-sites-") as made:
            print("three sites are brought up", file=sys.stderr, flush=True)
            with federated(arguments.data, Path(made), exposure=arguments.exposure) as sites:
                for name in real:
                    _measure_one(Setting(sites, _seeded(manifest, name), folders[name]), name)
    for name in simulated:
        print(f"{name} ...", file=sys.stderr, flush=True)
        seeded = _seeded(manifest, name)
        found = one_cluster(seeded, arguments.data.resolve(), folders[name], arguments.threads)
        found.save(folders[name])


def _measure_one(setting: Setting, name: str) -> None:
    """One part; where it fails that is said, and the others may still be measured."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    part = BY_SEED.get(name.partition("-")[0]) or ONCE[name]
    try:
        part(setting).save(setting.out)
    except Exception:  # noqa: BLE001 - whatever it is, it is told whole
        traceback.print_exc()
        print(f"{name} failed: see {setting.out}", file=sys.stderr, flush=True)


def _seeded(manifest: Document, name: str) -> Document:
    """The manifest with the seed that the part's name ends in, if it does."""
    document = copy.deepcopy(manifest)
    seed = name.partition("-")[2]
    if seed:
        document["spec"]["trainer"]["seed"] = int(seed)
    return document


def _report(found: dict[str, Measured], arguments: argparse.Namespace) -> int:
    """Prints what there is; the exit code."""
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
    """Figures but for whole statuses."""
    return {name: value for name, value in measured.figures.items() if name != "at_the_end"}


if __name__ == "__main__":
    sys.exit(main())
