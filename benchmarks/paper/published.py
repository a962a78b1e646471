"""The comparisons of the paper, part by part: manifests, columns, environments, goals and grids.

This module has the settings of the published evaluations as `dlion compare` takes them. It runs
nothing. Manifests, and environments without a published name, are files in this folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from comparison import CIFAR10, HERE, MNIST, SLIDES, Comparison, Grids

if TYPE_CHECKING:
    from collections.abc import Mapping

MOBILENET = "trainer.program.builtin=mobilenet"
WRONG_LABELS = HERE.parent / "wrong_labels" / "job.yaml"

PUBLISHED = (
    "hetero-sys-a", "hetero-sys-b", "hetero-cpu-a", "hetero-net-a", "homo-a", "homo-b",
    "dynamic-sys-a", "intercontinental",
)  # fmt: skip
SLIDES_ENVIRONMENTS = ("three-low-one-high", "two-clouds", "two-clouds-hetero")
FORMS, ADAPTIVE, BASELINES = (
    ("dlion", "dlion-published"),
    "adaptive",
    ("full", "ako", "gaia", "hop"),
)
TWO_STEP = "twostep"
WEIGHTED = ", weighted"
"""Suffix of a baseline's column with weighted batches."""

_NO_MOMENTUM = "trainer.optimizer.momentum=0"
"""Setting for late gradients, which accumulate with momentum (docs/exchange.md)."""
_WHOLE_LINKS = "network.bandwidthFraction=1"
"""Published systems use the full rate of links."""

RATES, RATES_WITHOUT_MOMENTUM = (0.02, 0.05, 0.1), (0.05, 0.1, 0.2)
"""Learning rates that a column tries in each environment; more if the best one is first or last."""

TECHNIQUES: Mapping[str, tuple[str, str]] = {
    "weighted batches": ("batching.policy=even", "hetero-cpu-a"),
    "largest entries": ("exchange.prioritization=false", "hetero-net-a"),
    "knowledge transfer": ("knowledgeTransfer.policy=none", "hetero-sys-a"),
    "growing batch": ("batching.globalBatchSize.growth=false", "homo-a"),
}
"""The setting that switches each technique off, and its environment."""


def comparisons() -> list[Comparison]:
    """Return all comparisons in the order of the page."""
    return [
        _systems(), _slides(), *_recent(), *_served(), *_techniques(), *_adacomp(), _fedat(),
        *_delays(), *_selective(), *_two_step(), _wrong_labels(), _gpu(),
    ]  # fmt: skip


def _systems() -> Comparison:
    return Comparison(
        part="systems", name="systems", file=CIFAR10, columns=_system_columns(),
        environments=PUBLISHED, target=0.6, seconds=600, grids=_system_grids(), held=ADAPTIVE,
        with_ideal=True,
    )  # fmt: skip


def _slides() -> Comparison:
    return Comparison(
        part="slides", name="slides", file=SLIDES, columns=_system_columns(),
        environments=SLIDES_ENVIRONMENTS, target=0.6, seconds=1800, grids=_system_grids(),
        held=ADAPTIVE, with_ideal=True, workers=4, batch=128,
    )  # fmt: skip


def _recent() -> list[Comparison]:
    """Compare `adaptive` with the systems of 2023 to 2025 whose workers wait for all."""
    return _in_both_places("recent", _recent_columns())


def _served() -> list[Comparison]:
    """Compare `adaptive` with the systems of 2025 and 2026 whose workers send to a server."""
    return _in_both_places("served", _served_columns())


def _in_both_places(name: str, columns: Mapping[str, str]) -> list[Comparison]:
    """Return comparisons in the environments of `systems` and of `slides`."""
    return [
        replace(
            place, part=part, name=part, columns=columns, with_ideal=False,
            grids=dict.fromkeys(columns, RATES),
        )
        for part, place in ((name, _systems()), (f"{name}-slides", _slides()))
    ]  # fmt: skip


def _recent_columns() -> dict[str, str]:
    """Return columns; whole weights need long rounds on these links, so DiLoCo has two lengths."""
    bare = "knowledgeTransfer.policy=none;batching.globalBatchSize.growth=false"
    diloco = (
        f"exchange.policy=localsgd;{bare};exchange.parameters={{outerMomentum: 0.9, localSteps: "
    )
    return {
        ADAPTIVE: f"exchange.policy=adaptive;{bare}",
        "demo": f"exchange.policy=demo;{bare};{_NO_MOMENTUM}",  # it has its own momentum
        "sparseloco": f"exchange.policy=sparseloco;{bare}",
        "diloco, 50 steps": f"{diloco}50}}",
        "diloco, 200 steps": f"{diloco}200}}",
    }


def _served_columns() -> dict[str, str]:
    """Return columns; whole weights have two lengths of a round, too.

    The servers of HALoS are as published, and with less momentum, which suits small sites.
    """
    bare = "knowledgeTransfer.policy=none;batching.globalBatchSize.growth=false"
    quorum, halos = (
        f"exchange.policy={name};{bare};exchange.parameters={{localSteps: "
        for name in ("quorum-diloco", "halos")
    )
    mild = "localMomentum: 0.5, localPeriod: 4, globalLearningRate: 0.5, mergeWeight: 0.5"
    return {
        ADAPTIVE: f"exchange.policy=adaptive;{bare}",
        "quorum-diloco, 50 steps": f"{quorum}50, overlapSteps: 10}}",
        "quorum-diloco, 200 steps": f"{quorum}200, overlapSteps: 40}}",
        "halos, 8 steps": f"{halos}8}}",
        "halos, 8 steps, mild servers": f"{halos}8, {mild}}}",
        "halos, 50 steps": f"{halos}50}}",
    }


def _gpu() -> Comparison:
    systems = _systems()
    return replace(
        systems, part="gpu", name="gpu", environments=("gpu-a",), target=0.5, seconds=120,
        settings=(MOBILENET,),
    )  # fmt: skip


def _system_columns() -> dict[str, str]:
    """Return ours, both forms of dlion, and each other system with even and weighted batches."""
    bare = "knowledgeTransfer.policy=none;batching.globalBatchSize.growth=false"
    columns = {
        ADAPTIVE: f"exchange.policy=adaptive;{bare}",
        "dlion": "exchange.policy=dlion",
        "dlion-published": "exchange.policy=dlion-published;exchange.weighting=dlion_ratio;"
        f"{_WHOLE_LINKS}",
    }
    bare = f"{bare};{_WHOLE_LINKS}"
    # gaia and hop have their own pace; Ako's workers never wait.
    paces = {"ako": f";synchronization.mode=asynchronous;{_NO_MOMENTUM}"}
    for batching, ending in (("even", ""), ("weighted", WEIGHTED)):
        for name in BASELINES:
            columns[f"{name}{ending}"] = (
                f"exchange.policy={name};batching.policy={batching};{bare}{paces.get(name, '')}"
            )
    return columns


def _system_grids() -> Grids:
    """Return the rates of each column: even and weighted batches may need different ones."""
    columns = {**_system_columns(), "ideal": ""}
    return {
        name: RATES_WITHOUT_MOMENTUM if _NO_MOMENTUM in settings else RATES
        for name, settings in columns.items()
    }


def _techniques() -> list[Comparison]:
    """Return columns with all techniques, all but one, only that one, and none."""
    every = [off for off, _ in TECHNIQUES.values()]
    return [
        Comparison(
            part="techniques", name=name.replace(" ", "-"), file=CIFAR10, environments=(place,),
            columns={
                "dlion": "exchange.policy=dlion",
                f"without {name}": off,
                f"{name} alone": ";".join(other for other in every if other != off),
                "none of the four": ";".join(every),
            },
            target=0.6, seconds=600, grids={"dlion": RATES}, held="dlion",
        )
        for name, (off, place) in TECHNIQUES.items()
    ]  # fmt: skip


def _adacomp() -> list[Comparison]:
    """Return comparisons of bytes into the server, positions as they are and coded.

    The number of samples does not depend on the workers, except by waits. A gradient counts by its
    share of the batch, and AdaComp divides it further, so rates are high.
    """
    adacomp = "exchange.policy=adacomp;exchange.parameters={server: 0};exchange.codec="
    columns = {
        "async": "exchange.policy=async;exchange.parameters={server: 0};exchange.codec=float32",
        "adacomp float32": f"{adacomp}float32;exchange.indexCodec=fast",
        "adacomp float16, coded": f"{adacomp}float16;exchange.indexCodec=smallest",
    }
    return [
        Comparison(
            part="adacomp", name=f"adacomp-{n}", file=MNIST, columns=columns,
            environments=(f"mnist-{n}", *(("mnist-20-crash",) if n == 20 else ())),
            settings=(f"sites[0].groups[0].workers={n}", _batch(10 * n)), target=0.97,
            seconds=24_000 // n, grids={"async": (0.2, 0.5, 1.0), "adacomp": (1.0, 2.0, 4.0)},
            held="adacomp float16, coded", tuned_in=f"mnist-{n}", workers=n, batch=10 * n,
        )
        for n in (5, 10, 20, 40)
    ]  # fmt: skip


def _fedat() -> Comparison:
    """Compare tiers by polylines of several lengths; synchronous averaging and async, with a
    server.
    """
    fedat = "exchange.policy=fedat;exchange.parameters="
    columns = {f"fedat d={d}": f"{fedat}{{decimals: {d}}}" for d in (4, 3, 2)}
    columns["fedat uncoded"] = f"{fedat}{{decimals: 9}}"
    columns["synchronous averaging"] = f"{fedat}{{tierCount: 1, proximal: 0, decimals: 9}}"
    asynchronous = "exchange.policy=async;exchange.parameters={server: 0};exchange.codec=float32"
    columns["async"] = asynchronous
    return Comparison(
        part="fedat", name="fedat", file=CIFAR10, columns=columns, environments=("hetero-sys-a",),
        settings=(
            "trainer.dataset.partition=dirichlet", "trainer.dataset.dirichletAlpha=0.3",
            "trainer.optimizer.momentum=0", "batching.policy=even",
            "batching.globalBatchSize.growth=false", "knowledgeTransfer.policy=none",
        ),
        target=0.5, seconds=1200, held="fedat d=3",
        grids={"fedat": (0.02, 0.05, 0.1), "async": (0.02, 0.05, 0.1)},
    )  # fmt: skip


def _delays() -> list[Comparison]:
    """Compare gradients that are 5 to 20 updates late: one for each other worker of a server."""
    own = "exchange.policy=async;exchange.parameters="
    return [
        Comparison(
            part="delays", name=f"delay-{n - 1}", file=CIFAR10, environments=(f"delay-{n}",),
            columns={
                "plain": f"{own}{{server: 0}}",
                "compensated 0.04": f"{own}{{server: 0, compensation: 0.04}}",
                "compensated 1": f"{own}{{server: 0, compensation: 1}}",
            },
            settings=(
                _one_site(n), _batch(32 * n), "trainer.optimizer.momentum=0",
                "batching.policy=even", "batching.globalBatchSize.growth=false",
                "knowledgeTransfer.policy=none",
            ),
            target=0.6, seconds=12_000 // n, grids={"async": (0.02, 0.05, 0.1)},
            held="compensated 0.04", workers=n, batch=32 * n,
        )
        for n in (6, 11, 16, 21)
    ]  # fmt: skip


def _selective() -> list[Comparison]:
    """Compare with as many samples for any number of workers, which determines the seconds.

    Each column has its own rate, and no momentum, which does not suit late gradients.
    """
    return [
        Comparison(
            part="selective", name=f"selective-{n}", file=CIFAR10, environments=(f"wide-{n}",),
            columns={
                "all": "exchange.propagation=all", "selective": "exchange.propagation=selective"
            },
            settings=(
                _one_site(n), _batch(32 * n), "trainer.optimizer.momentum=0",
                "batching.globalBatchSize.growth=false",
            ),
            target=0.6, seconds=3_600 // n, held="selective",
            grids={"all": (0.2, 0.5, 1.0), "selective": (0.2, 0.5, 1.0)},
            workers=n, batch=32 * n,
        )
        for n in (6, 24, 96)
    ]  # fmt: skip


def _two_step() -> list[Comparison]:
    """Compare the time to the target with the number of workers, each with a batch of its own.

    The slides have this curve as a picture without numbers, and name no rate of a link. Links are
    those of `intercontinental`: the slides' 78 ms there and back, and 50 Mbit/s of each worker.
    `full` sends whole gradients to each peer; bars.py computes a ring all-reduce from `ideal`.
    """
    low, high = (0.005, 0.01, 0.02), (0.01, 0.02, 0.05)  # for small and for large batches
    columns = {
        "full": "exchange.policy=full",
        TWO_STEP: f"exchange.policy=twostep;{_NO_MOMENTUM}",  # it has its own momentum
    }
    return [
        Comparison(
            part="two-step", name=f"two-step-{n}", file=MNIST, columns=columns,
            environments=(f"edge-{n}",),
            settings=(
                f"sites[0].groups[0].workers={n}", _batch(10 * n), "exchange.parameters=",
                "trainer.optimizer.momentum=0.9", "trainer.evaluation.everySamples=500",
                _WHOLE_LINKS,
            ),
            target=0.9, seconds=4_000 // n, grids=dict.fromkeys((*columns, "ideal"), rates),
            held=TWO_STEP, with_ideal=True, workers=n, batch=10 * n,
        )
        for n, rates in ((1, low), (2, low), (4, high), (8, high))
    ]  # fmt: skip


def _wrong_labels() -> Comparison:
    """Compare with 40 % wrong labels at one of three sites (benchmarks/wrong_labels)."""
    own = "exchange.policy=hierarchical"
    kinds = {"mean": "", "median": ";exchange.parameters.combine=median"}
    labels = {"wrong": "", "right": ";trainer.program.file=clean.py"}
    return Comparison(
        part="wrong-labels", name="wrong-labels", file=WRONG_LABELS,
        columns={
            f"{kind}, {label}": f"{own}{combined}{program}"
            for label, program in labels.items()
            for kind, combined in kinds.items()
        },
        environments=("intercontinental",), target=0.9, seconds=60,
        grids={"hierarchical": (0.02, 0.05, 0.1)}, held="median, wrong",
    )  # fmt: skip


def _one_site(workers: int) -> str:
    return f"sites=[{{name: a, groups: [{{name: workers, workers: {workers}}}]}}]"


def _batch(samples: int) -> str:
    return f"batching.globalBatchSize.initial={samples}"
