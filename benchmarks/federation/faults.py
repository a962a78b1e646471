"""The parts with faults: links cut, a site killed, operators stopped.

Each trains its own job, which runs until its records are fetched.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import run_records
from federated_sites import KILL_TRAINER, wait_until
from federated_training import Setting, Training, training
from measured import Bar, Measured

from dlion_api.errors import UnavailableError
from iteration_losses import IterationLoss, iteration_losses, lost_by_waiting

CONTINUES_WITHIN_S = 10.0
"""A silent link is closed after eight seconds; then workers that waited for it continue."""
CONTRIBUTES_WITHIN_S = 30.0
AGAIN_S = 300.0
"""Longest time until all train again."""
KILLED = 2
"""Workers that are killed while operators are away."""
_NEVER = "never"


def cut(setting: Setting, *, cut_s: float = 60.0) -> Measured:
    """Cut the link between the first two sites during the run and restore it."""
    one, other, _ = setting.sites.names
    with training(setting, setting.endless("cut")) as job:
        job.wait_for_iterations(3 * setting.every_steps)
        cut_at_s, cut_wall_s = time.monotonic(), time.time()
        setting.sites.testbed.cut(one, other)
        time.sleep(cut_s)
        setting.sites.testbed.mend(one, other)
        mended_s = time.monotonic()
        job.wait_for_iterations(3 * setting.every_steps)
        job.wait_until_all_train(AGAIN_S)
        job.fetch()
        degraded, events = job.degraded(cut_at_s), job.events(cut_wall_s)
    paces = {
        site: run_records.pace(job.records, rank, cut_at_s, mended_s)
        for site, rank in job.ranks.items()
    }
    gap_s = max(each.longest_gap_s for each in paces.values())
    drift, later = _drift_about(job, setting.every_steps, cut_at_s, mended_s)
    figures = {
        "iterations": {site: each.iterations for site, each in paces.items()},
        "longest_gap_s": {site: each.longest_gap_s for site, each in paces.items()},
        "iterations_as_long_before": {
            site: run_records.pace(job.records, rank, 2 * cut_at_s - mended_s, cut_at_s).iterations
            for site, rank in job.ranks.items()
        },
        **drift,
        "degraded": degraded,
        "events": events,
        "reported": run_records.counted_events(job.records, cut_at_s, float("inf")),
    }
    words = _NEVER if later is None else f"after {later} iterations"
    both = [site for site in (one, other) if _on_and_off(degraded[site])]
    reporting = [site for site in (one, other) if "PeersLost" in events[site]]
    bars = [
        Bar(f"training continues at every site within {CONTINUES_WITHIN_S:g} s",
            f"longest pause {gap_s:.1f} s", gap_s <= CONTINUES_WITHIN_S),
        Bar(f"drift at its earlier level within 2 knowledge transfers' {2 * setting.every_steps}",
            words, later is not None and later <= 2 * setting.every_steps),
        Bar("Degraded on and off at both sides", f"at {len(both)} of 2", len(both) == 2),
        Bar("an event reports it at both sides", f"at {len(reporting)} of 2", len(reporting) == 2),
    ]  # fmt: skip
    return Measured(setting.out.name, figures, bars)


def _drift_about(
    job: Training, period: int, cut_s: float, mended_s: float
) -> tuple[dict[str, float | None], int | None]:
    """Return drift before, during and after the cut, and the iterations until it recovered.

    Recovered: at most the maximum in the two knowledge-transfer periods before the cut.
    """
    records, curve = job.records, run_records.drift_curve(job.records)
    two_periods_before = run_records.iteration_at(records, cut_s) - 2 * period
    level = run_records.max_drift(curve, run_records.time_of(records, two_periods_before), cut_s)
    back_s = run_records.back_at(curve, level, mended_s)
    later = None
    if back_s is not None:
        mended_at = run_records.iteration_at(records, mended_s)
        later = run_records.iteration_at(records, back_s) - mended_at
    drift = {
        "drift_before": level,
        "drift_in_it": run_records.max_drift(curve, cut_s, mended_s),
        "drift_after_until_back": run_records.max_drift(curve, mended_s, back_s or float("inf")),
        "drift_once_back": run_records.max_drift(curve, back_s, float("inf")) if back_s else None,
        "mended_to_drift_back_s": None if back_s is None else back_s - mended_s,
    }
    return drift, later


def _on_and_off(turns: list[str]) -> bool:
    """Report whether the condition turned on and is off at the end."""
    words = [turn.split()[0] for turn in turns]
    return "on" in words and words[-1] == "off"


def isolated(setting: Setting, *, cut_s: float = 60.0) -> Measured:
    """Cut the last site off from both others during the run; a site alone is too few."""
    *others, alone = setting.sites.names
    with training(setting, setting.endless("isolated", minSites=2)) as job:
        job.wait_for_iterations(2 * setting.every_steps)
        cut_at_s = time.monotonic()
        for other in others:
            setting.sites.testbed.cut(alone, other)
        time.sleep(cut_s)
        for other in others:
            setting.sites.testbed.mend(alone, other)
        mended_s = time.monotonic()
        job.wait_for_iterations(2 * setting.every_steps)
        job.wait_until_all_train(AGAIN_S)
        job.fetch()
        states = {site: job.states(site, cut_at_s, mended_s) for site in job.ranks}
    rank, still_s = job.ranks[alone], cut_at_s + CONTINUES_WITHIN_S
    trained = run_records.pace(job.records, rank, still_s, mended_s).iterations
    back = [s.time_s for s in run_records.steps_of(job.records, rank) if s.time_s > mended_s]
    paces = {
        site: run_records.pace(job.records, job.ranks[site], cut_at_s, mended_s) for site in others
    }
    gap_s = max(each.longest_gap_s for each in paces.values())
    counts = {site: _event_counts(job, site, cut_at_s) for site in job.ranks}
    figures = {
        "iterations_of_the_others": {site: each.iterations for site, each in paces.items()},
        "longest_gap_s": {site: each.longest_gap_s for site, each in paces.items()},
        "mended_to_first_step_s": _since(min(back, default=None), mended_s),
        "states": states,
        "reported": counts,
    }
    taken = sum(counts[site].get("FoldedTogether", 0) for site in others)
    rejoined = counts[alone].get("WorkerRejoined", 0)
    bars = [
        Bar(f"a site below minSites makes no iteration from {CONTINUES_WITHIN_S:g} s on",
            f"{trained}", trained == 0),
        Bar("its state is Waiting, and an event has the reason",
            ", ".join([*states[alone], *counts[alone]]),
            "Waiting" in states[alone] and "QuorumLost" in counts[alone]),
        Bar(f"the others continue within {CONTINUES_WITHIN_S:g} s", f"longest pause {gap_s:.1f} s",
            gap_s <= CONTINUES_WITHIN_S),
        Bar("back, it takes their weights and they take none of its",
            f"rejoined {rejoined} times, {taken} foldings at the others",
            bool(back) and rejoined > 0 and taken == 0),
    ]  # fmt: skip
    return Measured(setting.out.name, figures, bars)


def _event_counts(job: Training, site: str, since_s: float) -> dict[str, int]:
    """Return how often that site's worker reported each reason."""
    own = [each for each in job.records if each.rank == job.ranks[site]]
    return run_records.counted_events(own, since_s, float("inf"))


def lost(setting: Setting, *, away_s: float = 30.0) -> Measured:
    """Kill the whole second site during the run and bring it back."""
    names, testbed = setting.sites.names, setting.sites.testbed
    gone = names[1]
    with training(setting, setting.endless("lost")) as job:
        job.wait_for_iterations(2 * setting.every_steps)
        killed_s, killed_wall_s = time.monotonic(), time.time()
        testbed.kill_site(gone)
        time.sleep(away_s)
        powered_s = time.monotonic()
        testbed.start_site(gone)
        nodes_s = time.monotonic()
        running_s = wait_until(
            lambda: _trainer_runs_since_s(setting, gone, job.job, killed_wall_s),
            within_s=AGAIN_S,
            what=f"a worker's pod runs at {gone}",
        )
        joined_zero_s = wait_until(
            lambda: _zero_s(setting, gone, job.job), within_s=AGAIN_S, what="its worker joins"
        )
        _wait_for_new_step(job, gone, killed_s, joined_zero_s)
        job.wait_for_iterations(setting.every_steps)
        job.fetch()
        job.wait_until_all_train(AGAIN_S)
        degraded, events = job.degraded(killed_s), job.events(killed_wall_s)
    first_s = _new_step_s(job, gone, killed_s, joined_zero_s)
    after_s = None if first_s is None else first_s - running_s
    whole = _losses(job, gone, killed_s, float("inf"))
    staying = [rank for site, rank in job.ranks.items() if site != gone]
    done = run_records.iteration_at(job.records, killed_s)
    lost_s = lost_by_waiting(job.records, staying=staying)
    waited_s = {iteration: by_s for iteration, by_s in lost_s.items() if iteration > done}
    figures = {
        "away_s": powered_s - killed_s,
        "power_to_ready_nodes_s": nodes_s - powered_s,
        "power_to_running_pod_s": running_s - powered_s,
        "running_pod_to_first_step_s": after_s,
        "others": {site: _loss_figures(loss) for site, loss in whole.items()},
        "others_until_power": {
            site: _loss_figures(loss)
            for site, loss in _losses(job, gone, killed_s, powered_s).items()
        },
        "lost_by_waiting_s": waited_s,
        "degraded": degraded,
        "events": events,
        "reported": run_records.counted_events(job.records, killed_s, float("inf")),
    }
    longer = max(_lost(loss) for loss in whole.values())
    most = len(waited_s) + max(len(loss.discarded) for loss in whole.values())
    bars = [
        Bar("the others lose at most one iteration each",
            f"{most} by waiting ({longer} with those in which a core was lacking)", most <= 1),
        Bar(f"the site contributes within {CONTRIBUTES_WITHIN_S:g} s of its pods' running",
            _after(after_s), after_s is not None and after_s <= CONTRIBUTES_WITHIN_S),
    ]  # fmt: skip
    return Measured(setting.out.name, figures, bars)


def operators(setting: Setting, *, away_s: float = 120.0) -> Measured:
    """Stop all operators; meanwhile kill a trainer at one site and delete a pod at another."""
    sites = setting.sites
    killed, _, deleted = sites.names
    with training(setting, setting.endless("operators")) as job:
        job.wait_for_iterations(2 * setting.every_steps)
        sites.operators(0)
        moments = {"stopped": time.monotonic()}
        _sleep_until(moments["stopped"] + away_s / 4)
        moments["killed"] = time.monotonic()
        sites.in_trainer(killed, job.job, "python3", "-c", KILL_TRAINER)
        _sleep_until(moments["stopped"] + away_s / 2)
        moments["deleted"] = time.monotonic()
        pod = sites.worker_pod(deleted, job.job)
        sites.kubectl(deleted).run("delete", "pod", pod, "--wait=false")
        _sleep_until(moments["stopped"] + away_s)
        message = _last_wait_message(setting, deleted, job.job)
        moments["back"] = time.monotonic()
        sites.operators(1)
        moments["ready"] = time.monotonic()
        joined_zero_s = wait_until(
            lambda: _zero_s(setting, deleted, job.job), within_s=AGAIN_S, what="the new pod joins"
        )
        _wait_for_new_step(job, deleted, moments["deleted"], joined_zero_s)
        job.wait_for_iterations(setting.every_steps)
        job.fetch()
    return _without_operators(setting, job, moments, message, joined_zero_s)


def _without_operators(
    setting: Setting, job: Training, moments: dict[str, float], message: str, joined_zero_s: float
) -> Measured:
    """Return the results for the killed workers, and for the untouched site between them."""
    killed, untouched, deleted = setting.sites.names
    away_s = moments["back"] - moments["stopped"]
    rank = job.ranks[untouched]
    stopped_s, killed_s = moments["stopped"], moments["killed"]
    quiet = iteration_losses(job.records, since_s=stopped_s, until_s=killed_s)[rank]
    whole = iteration_losses(job.records, since_s=stopped_s, until_s=moments["back"])[rank]
    rejoined_s = _new_step_s(job, killed, killed_s, job.zero_s[killed])
    joined_s = _new_step_s(job, deleted, moments["deleted"], joined_zero_s)
    before = run_records.pace(job.records, rank, 2 * stopped_s - killed_s, stopped_s)
    first, last = (
        run_records.iteration_at(job.records, at_s) for at_s in (stopped_s, moments["back"])
    )
    waited_s = {
        iteration: by_s
        for iteration, by_s in lost_by_waiting(job.records, staying=[rank]).items()
        if first < iteration <= last
    }
    discarded = [iteration for iteration in whole.discarded if first < iteration <= last]
    most, longer = len(waited_s) + len(discarded), len(whole.slow) + len(discarded)
    figures = {
        "away_s": moments["ready"] - stopped_s,
        "window_s": killed_s - stopped_s,
        "iterations_as_long_before": before.iterations,
        "untouched_until_the_kill": _loss_figures(quiet),
        "untouched_until_operators_are_back": _loss_figures(whole),
        "lost_by_waiting_s": waited_s,
        "kill_to_first_step_s": _since(rejoined_s, killed_s),
        "operators_ready_to_first_step_of_the_new_pod_s": _since(joined_s, moments["ready"]),
        "new_pod_said": message,
        "reported": run_records.counted_events(job.records, stopped_s, float("inf")),
    }
    bars = [
        Bar("no iteration is lost for want of operators",
            f"{_lost(quiet)} of {quiet.iterations}; as long before: {before.iterations}",
            quiet.iterations > 0 and _lost(quiet) == 0),
        Bar(f"nor in all {away_s:.0f} s more than one for each of the two that are killed",
            f"{most} of {whole.iterations} by waiting ({longer} with those"
            " in which a core was lacking)", whole.iterations > 0 and most <= KILLED),
        Bar("a killed trainer rejoins from kept membership while operators are away",
            _after(_since(rejoined_s, killed_s)),
            rejoined_s is not None and rejoined_s < moments["back"]),
        Bar("a new pod waits and logs it", message.strip() or "nothing", bool(message)),
        Bar("it joins once an operator is back", _after(_since(joined_s, moments["ready"])),
            joined_s is not None and joined_s >= moments["back"]),
    ]  # fmt: skip
    return Measured(setting.out.name, figures, bars)


def _since(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else at_s - since_s


def _after(seconds: float | None) -> str:
    return _NEVER if seconds is None else f"after {seconds:.1f} s"


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def _losses(job: Training, gone: str, since_s: float, until_s: float) -> dict[str, IterationLoss]:
    """Return the losses of the other sites' workers between these times."""
    by_rank = iteration_losses(
        job.records, killed=[job.ranks[gone]], since_s=since_s, until_s=until_s
    )
    return {site: by_rank[rank] for site, rank in job.ranks.items() if site != gone}


def _lost(loss: IterationLoss) -> int:
    return len(loss.slow) + len(loss.discarded)


def _loss_figures(loss: IterationLoss) -> dict[str, Any]:
    return {
        "iterations": loss.iterations,
        "median_s": loss.median_s,
        "longest_s": loss.longest_s,
        "slow": list(loss.slow),
        "discarded": list(loss.discarded),
    }


def _new_step_s(job: Training, site: str, since_s: float, zero_s: float) -> float | None:
    """Return when a later start of that site's worker, with its own zero, made its first step."""
    rank = job.ranks[site]
    known = run_records.incarnations(job.records, rank, since_s)
    first = run_records.first_step(job.records, rank, known=known)
    return None if first is None else first.time_s - job.zero_s[site] + zero_s


def _wait_for_new_step(job: Training, site: str, since_s: float, zero_s: float) -> None:
    """Wait until the records have one: a status may be older."""

    def stepped() -> bool:
        job.fetch()
        return _new_step_s(job, site, since_s, zero_s) is not None

    wait_until(stepped, within_s=AGAIN_S, what=f"a step of the new worker at {site}")


def _trainer_runs_since_s(
    setting: Setting, site: str, job: str, after_wall_s: float
) -> float | None:
    """Return the monotonic time, rounded down to a second, of the start of a trainer container."""
    offset_s = time.monotonic() - time.time()
    try:
        pods = setting.sites.pods(site, job)
    except UnavailableError:
        return None  # the API server is still away
    for pod in pods:
        for container in pod["status"].get("containerStatuses") or ():
            running = container["state"].get("running")
            if running and container["name"] == "trainer":
                started_s = datetime.fromisoformat(running["startedAt"]).timestamp()
                if started_s > after_wall_s:
                    return started_s + offset_s
    return None


def _last_wait_message(setting: Setting, site: str, job: str) -> str:
    """Return the newest log line of the site's first worker about its wait, or ""."""
    pod = setting.sites.worker_pod(site, job)
    text = setting.sites.kubectl(site).run("logs", pod, "-c", "trainer", "--tail=50")
    waits = ("no certificate yet", "no membership from the coordinator")
    lines = [line for line in text.splitlines() if any(words in line for words in waits)]
    return lines[-1] if lines else ""


def _zero_s(setting: Setting, site: str, job: str) -> float | None:
    """Return `FederatedSites.zero_s`, or None while the worker has not joined."""
    try:
        return setting.sites.zero_s(site, job)
    except UnavailableError:
        return None
