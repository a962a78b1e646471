"""Tests of the cause of a slow run.

Each planted cause is named, with figures and advice. In a balanced run, and in one without figures,
no cause is named. Of several causes the largest counts. No run is advised to use the policy that it
has.

Left out: the figures of a simulated run (tests/simulated/test_time_use.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_results.summary.awaited_link import LinkKind, LinkMedium, LinkUse
from dlion_results.summary.culprit import (
    AwaitedPeer,
    CulpritKind,
    RunUse,
    find_culprit,
    run_use,
)

MBIT = 125_000.0
BALANCED = {
    "compute": 0.7, "wait": 0.12, "select": 0.05, "encode": 0.02, "send": 0.0, "decode": 0.04,
    "apply": 0.02, "other": 0.05,
}  # fmt: skip
BUSY = LinkUse("hospital → factory", 18 * MBIT, 20 * MBIT)
RESTING = LinkUse("hospital → factory", 2 * MBIT, 20 * MBIT)
UNMEASURED = LinkUse("hospital → factory", 2 * MBIT, None)


def use(
    awaited: AwaitedPeer | None = None, changes: dict[str, float] | None = None, **shares: float
) -> RunUse:
    return RunUse({**BALANCED, **shares}, 4, awaited, changes)


def peer(
    link: LinkUse | None = None, *, fraction: float = 0.8, waits: float | None = 1.0
) -> AwaitedPeer:
    return AwaitedPeer("b-0", fraction, waits, link)


@pytest.mark.parametrize(
    ("given", "kind", "sentence_part"),
    [
        (
            use(peer(BUSY), wait=0.72),
            CulpritKind.SLOW_LINK,
            "72 % of the time waits for link hospital → factory: 18 of 20 Mbit/s used",
        ),
        (
            use(peer(BUSY, fraction=0.25), wait=0.72),
            CulpritKind.SLOW_LINK,
            "72 % of the time waits, most of all for link hospital → factory: 18 of 20 Mbit/s",
        ),
        (
            use(peer(RESTING), wait=0.72),
            CulpritKind.WAITING,
            "mostly for b-0, whose messages arrive late over link hospital → factory (20 Mbit/s)",
        ),
        (use(peer(UNMEASURED), wait=0.5), CulpritKind.WAITING, "b-0, whose messages arrive late"),
        (use(peer(), wait=0.5), CulpritKind.WAITING, "b-0, whose messages arrive late"),
        (
            use(peer(RESTING, fraction=0.25), wait=0.5),
            CulpritKind.WAITING,
            "of no worker in particular; longest over link hospital → factory (20 Mbit/s)",
        ),
        (use(wait=0.5), CulpritKind.WAITING, "50 % of the time waits for peers' messages"),
        (
            use(peer(BUSY, waits=0.05), wait=0.4),
            CulpritKind.SLOW_WORKER,
            "40 % of the time waits, mostly for b-0, whose steps take the longest",
        ),
        (
            use(peer(BUSY, waits=0.05), {"a-0": 1.0, "b-0": 0.4}, wait=0.4),
            CulpritKind.SLOWED_WORKER,
            "mostly for b-0: it computes at 40 % of what it did at the start",
        ),
        (
            use(None, {"a-0": 1.1, "b-0": 0.4}),
            CulpritKind.SLOWED_WORKER,
            "b-0 computes at 40 % of what it did at the start",
        ),
        (use(select=0.31), CulpritKind.SELECT, "31 % of the time goes to selecting"),
        (use(encode=0.31), CulpritKind.ENCODE, "31 % of the time goes to encoding"),
        (use(send=0.31), CulpritKind.SEND, "31 % of the time goes to queueing messages"),
        (use(decode=0.31), CulpritKind.DECODE, "31 % of the time goes to decoding"),
        (use(apply=0.31), CulpritKind.APPLY, "31 % of the time goes to changing the weights"),
        (use(other=0.4), CulpritKind.OTHER, "40 % of the time passes neither in gradients nor"),
        (use(peer(BUSY), wait=0.3, select=0.5), CulpritKind.SELECT, "50 % of the time goes to"),
        (use(peer(BUSY), wait=0.5, select=0.3), CulpritKind.SLOW_LINK, "50 % of the time waits"),
    ],
    ids=str,
)
def test_a_planted_culprit_is_named(given: RunUse, kind: CulpritKind, sentence_part: str) -> None:
    culprit = find_culprit(given)
    assert culprit is not None
    assert culprit.kind is kind
    assert sentence_part in culprit.sentence
    assert len(culprit.advice) > 20
    assert not culprit.sentence.endswith(".")


def test_a_smaller_batch_is_named_if_it_may_slow_a_worker() -> None:
    summary = {
        "time_use": {"wait_fraction": 0.1, "compute_fraction": 0.8},
        "workers": [worker(0), worker(1, pace_change=0.4, batch_change=0.2)],
    }
    culprit = find_culprit(run_use(summary))
    assert culprit is not None
    assert culprit.sentence == (
        "w-1 computes at 40 % of what it did at the start, with batches of 20 % of the size"
    )
    assert culprit.advice.startswith("Smaller batches cost more per sample: ")
    alike = run_use({**summary, "workers": [worker(0), worker(1, pace_change=0.4)]})
    assert "batches" not in str(find_culprit(alike))


@pytest.mark.parametrize(
    "given",
    [
        use(),
        use(peer(BUSY)),
        use(None, {"a-0": 1.4, "b-0": 0.8}),
        use(wait=0.2, select=0.15),
        RunUse({}, 1),
        RunUse({"compute": 1.0}, 1, None, {}),
        RunUse({"compute": 0.8, "wait": 0.2}, 30, None, {"a-0": 0.5}),  # one of many, not awaited
    ],
    ids=str,
)
def test_in_a_balanced_run_no_cause_is_named(given: RunUse) -> None:
    assert find_culprit(given) is None


def worker(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank, "name": f"w-{rank}", "steps": 10, "compute_s": 10.0, "waited_s": 5.0,
        "wall_s": 20.0, "pace_change": 1.0, "waited_for": [], "links": [], **more,
    }  # fmt: skip


def test_the_named_link_leads_to_the_worker_that_waited_most_for_the_peer() -> None:
    def link(to: int, acknowledged: int) -> dict[str, Any]:
        rate = {"last_bandwidth_bytes_per_s": 2.0 * MBIT}
        return {"peer": to, "acknowledged_bytes": acknowledged, **rate}

    summary = {
        "time_use": {
            "compute_fraction": 0.3, "wait_fraction": 0.6, "select_fraction": None,
            "waited_for": [{"rank": 2, "fraction": 0.9}, {"rank": 0, "fraction": 0.1}],
        },
        "workers": [
            worker(0, waited_for=[{"peer": 2, "seconds": 3.0}]),
            worker(1, waited_for=[{"peer": 2, "seconds": 9.0}]),
            worker(2, links=[link(0, 1), link(1, 30 * 125_000)]),
        ],
    }  # fmt: skip
    given = run_use(summary)
    assert given.fractions == {"compute": 0.3, "wait": 0.6}
    assert given.awaited == AwaitedPeer("w-2", 0.9, 0.5, LinkUse("w-2 → w-1", 1.5 * MBIT, 2 * MBIT))
    culprit = find_culprit(given)
    assert culprit is not None
    assert culprit.kind is CulpritKind.SLOW_LINK


PREFLIGHT = "dlion preflight FILE --contexts A,B --bandwidth"
RAISE = "give link w-1 → w-0 a higher rate or less latency in the environment"
MACHINE = "see what else runs on this machine"
SITES = {"betweenSites": {"latencyMs": 50.0}, "insideSites": {"latencyMs": 2.0}, "changes": []}
CORES = {
    "workers": [{"count": 2, "cores": 1.0, "mbitPerS": None}], "betweenSites": {"latencyMs": 0.0},
}  # fmt: skip


def late(environment: dict[str, Any] | None, site: str = "b") -> dict[str, Any]:
    """Two workers; the first waits for the second, whose link rests."""
    to_first = {
        "peer": 0, "acknowledged_bytes": 1, "last_bandwidth_bytes_per_s": 20 * MBIT,
    }  # fmt: skip
    return {
        "time_use": {"wait_fraction": 0.6, "waited_for": [{"rank": 1, "fraction": 1.0}]},
        "workers": [
            worker(0, waited_for=[{"peer": 1, "seconds": 9.0}], site="a"),
            worker(1, links=[to_first], site=site),
        ],
        "environment": environment,
    }


def environment(command: str, **more: Any) -> dict[str, Any]:
    return {"command": command, "name": "", "figures": [], "notes": [], "document": {}, **more}


def figure(latency_ms: float | None) -> dict[str, Any]:
    return {"rank": 1, "peer": 0, "quantity": "latency, one way", "measured": latency_ms}


@pytest.mark.parametrize(
    ("given", "figures", "advice", "absent"),
    [
        (late(None), "(20 Mbit/s)", f"measure link w-1 → w-0 ({PREFLIGHT})", "environment"),
        (late(environment("run")), "(20 Mbit/s)", f"{MACHINE}, which", "preflight"),
        (
            late(environment("run", document=SITES)),
            "(20 Mbit/s, latency 50 ms)", f"{MACHINE}, or {RAISE}", "preflight",
        ),
        (late(environment("run", document=CORES)), "(20 Mbit/s)", f"{MACHINE}, which", RAISE),
        (
            late(environment("simulate", document=CORES)),
            "(20 Mbit/s)", "give the awaited workers more cores in the environment", RAISE,
        ),
        (
            late(environment("simulate", document={**CORES, "insideSites": {"lossPercent": 5.0}})),
            "(20 Mbit/s)", "give link w-1 → w-0 less packet loss in the environment", "cores",
        ),
        (  # packets are lost in virtual time only
            late(environment("run", document={**CORES, "insideSites": {"lossPercent": 5.0}})),
            "(20 Mbit/s)", f"{MACHINE}, which", "environment",
        ),
        (
            late(environment("simulate", document={**CORES, "changes": [{"cutWorkers": [0]}]})),
            "(20 Mbit/s)", "give link w-1 → w-0 fewer or shorter cuts in the environment", "cores",
        ),
        (
            late(environment("run", document={**CORES, "changes": [{"cutSites": ["b"]}]})),
            "(20 Mbit/s)", f"{MACHINE}, or give link w-1 → w-0 fewer or shorter cuts", "latency",
        ),
        (
            late(environment(
                "simulate", document={**SITES, "changes": [{"betweenSitesLossPercent": 9.0}]}
            )),
            "(20 Mbit/s, latency 50 ms)", "a higher rate, less latency or less packet loss in the",
            "preflight",
        ),
        (
            late(environment("run", document={**CORES, "changes": [{"mbitPerS": [9.0, 9.0]}]})),
            "(20 Mbit/s)", RAISE, "preflight",
        ),
        (
            late(environment("simulate", document={**CORES, "radio": {"mbitPerS": 9.0}})),
            "(20 Mbit/s)", RAISE, "machine",
        ),
        (
            late(environment("simulate", document=SITES), site="a"),
            "(20 Mbit/s, latency 2 ms)", RAISE, "machine",
        ),
        (
            late(environment("replay", figures=[figure(7.5)])),
            "(20 Mbit/s, latency 7.5 ms)", RAISE, "preflight",
        ),
        (  # it was asked for and not imposed
            late(environment("run", document=SITES, figures=[figure(None)])),
            "(20 Mbit/s)", RAISE, "preflight",
        ),
        (  # which one a worker waited for is not known
            late(environment(
                "simulate", document={**SITES, "changes": [{"betweenSitesLatencyMs": 9.0}]}
            )),
            "(20 Mbit/s)", RAISE, "preflight",
        ),
        (
            late(environment(
                "run", document={"betweenSites": {"latencyMs": "x"}, "changes": 7}, figures=[3]
            )),
            "(20 Mbit/s)", RAISE, "preflight",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["full", "adaptive"])
def test_the_link_and_what_to_do_about_it_are_those_of_where_the_run_is(
    given: dict[str, Any], figures: str, advice: str, absent: str, policy: str
) -> None:
    culprit = find_culprit(run_use(given, policy))
    assert culprit is not None
    assert culprit.sentence.endswith(f"over link w-1 → w-0 {figures}")
    assert advice in culprit.advice
    assert absent not in culprit.advice


@pytest.mark.parametrize(
    ("fraction", "end"),
    [
        (0.8, "mostly for b-0; slowest link of its site: hospital → factory (20 Mbit/s)"),
        (0.25, "of no worker in particular"),
    ],
)
def test_no_link_is_waited_for_where_the_waiting_worker_is_unknown(
    fraction: float, end: str
) -> None:
    culprit = find_culprit(use(AwaitedPeer("b-0", fraction, None, site_link=RESTING), wait=0.5))
    assert culprit is not None
    assert culprit.sentence.endswith(end)
    assert "measure the links" in culprit.advice


@pytest.mark.parametrize(
    ("medium", "advice"),
    [
        (LinkMedium(LinkKind.EMULATED), "more bandwidth in the environment"),
        (
            LinkMedium(LinkKind.SIMULATED, ("less packet loss",)),
            "less packet loss in the environment",
        ),
    ],
)
def test_a_busy_link_of_an_environment_is_raised_there(medium: LinkMedium, advice: str) -> None:
    given = replace(use(peer(BUSY), wait=0.72), links=medium)
    culprit = find_culprit(given)
    assert culprit is not None
    assert culprit.advice.endswith(f"give link hospital → factory {advice}")


def test_a_peer_without_steps_is_named_by_its_rank() -> None:
    use_of = {"wait_fraction": 0.6, "waited_for": [{"rank": 7, "fraction": 0.9}]}
    culprit = find_culprit(run_use({"time_use": use_of, "workers": [worker(0), worker(1)]}))
    assert culprit is not None
    assert "worker 7" in culprit.sentence


def test_a_run_without_a_step_has_no_cause() -> None:
    assert find_culprit(run_use({"time_use": None, "workers": [worker(0, steps=0)]})) is None


@pytest.mark.parametrize(
    "given",
    [
        use(wait=0.5),
        use(peer(), wait=0.5),
        use(peer(BUSY), wait=0.72),
        use(peer(waits=0.0), wait=0.5),
        use(select=0.4),
        use(decode=0.4),
    ],
)
def test_no_advice_repeats_what_the_run_does_already_or_ignores(given: RunUse) -> None:
    """`adaptive` has its own waiting rule and codec."""
    usual, adaptive = find_culprit(given), find_culprit(replace(given, policy="adaptive"))
    assert usual is not None
    assert adaptive is not None
    assert replace(adaptive, advice=usual.advice) == usual
    for words in ("adaptive", "synchronization.mode", "exchange."):
        assert words not in adaptive.advice
    assert find_culprit(replace(given, policy="full")) == usual
