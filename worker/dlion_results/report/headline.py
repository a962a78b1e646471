"""The headline of the report page: one or two sentences with the outcome.

Made of the job and the summary alone. Texts of files occur shortened; the template escapes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dlion_api.spec import Job
from dlion_api.status_names import ACCURACY
from dlion_results.report.formats import duration, rough_accuracy, shortened, without_queries
from dlion_results.report.runs import LoadedRun
from dlion_results.report.stored_files import UNFINISHED
from dlion_results.summary.accuracy_name import common_name
from dlion_results.summary.judgement import EndReason

MAX_LISTED_RUNS: Final = 3
_LABEL_LENGTH: Final = 60
_NUMBERS: Final = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_FAILURES: Final[Mapping[str, str]] = {
    EndReason.ENDED_EARLY: "Ended before its stop rule was met",
    EndReason.DEADLINE_EXCEEDED: "Stopped by its deadline",
    EndReason.PROGRAM_FAILED: "The program failed",
    EndReason.DATA_FAILED: "The data could not be used",
    EndReason.DIVERGED: "Training diverged",
    EndReason.STORAGE_FAILED: "The results could not be stored",
    EndReason.UNAVAILABLE: "Ended, as a part that it needs was not available",
    EndReason.INTERRUPTED: "Interrupted",
}
_RUN_ENDS: Final = ("stop", "runID", "runId")
"""Settings of how long a run lasts, not of what it does."""


def headline(runs: Sequence[LoadedRun]) -> str:
    """What came out of this run, or of these side by side."""
    if len(runs) == 1:
        return f"{_first_sentence(runs[0])}."
    if len(runs) > MAX_LISTED_RUNS:
        return _range_of(runs)
    jobs = [run.job for run in runs]
    same_places = len({setting(job) for job in jobs}) == 1
    contrasts = _contrasts(runs)
    sentences = [] if same_places and contrasts[0] is None else [f"{setting(jobs[0])}."]
    for run, contrast in zip(runs, contrasts, strict=True):
        if contrast is None:
            sentences.append(f"{_first_sentence(run)}.")
            continue
        place = "" if same_places or run is runs[0] else f" ({_uncapitalised(setting(run.job))})"
        failure = ending_words(run)
        prefix = f"{_uncapitalised(failure)}; " if failure else ""
        sentences.append(f"{contrast}{place}: {prefix}{result(run, short=True)}.")
    return " ".join(sentences)


def setting(job: Job) -> str:
    """How many workers train where, and on what.

    >>> _number(2), _number(13)
    ('two', '13')
    """
    sites, workers = job.spec.sites, sum(1 for _ in job.workers())
    if len(sites) == 1:
        return _capitalised(f"{_number(workers)} worker{'s' * (workers != 1)}")
    places = f"{_number(len(sites))} sites"
    if classes := _classes(job):
        return _capitalised(f"{places}, each with {classes}")
    return _capitalised(f"{places}, {_number(workers)} workers")


def result(run: LoadedRun, *, short: bool = False) -> str:
    """The accuracy, where and when; with `short` without what is as usual."""
    accuracy, target = run.summary["accuracy"], run.summary["target"]
    if accuracy["mean"] is None:
        return "no replica was evaluated"
    mean, least, most = (
        rough_accuracy(accuracy[each], run.accuracy_name) for each in ("mean", "min", "max")
    )
    if run.accuracy_name != ACCURACY:
        mean = f"{run.accuracy_name} {mean}"
    if accuracy["replicas"] == 1:
        text = mean
    elif least == most:
        text = mean if short else f"{mean} at every replica"
    else:
        text = f"{mean} on average ({least} to {most})"
    if target and (reached_s := target["training_time_s"]) is not None:
        goal = rough_accuracy(target["accuracy"], run.accuracy_name)
        return f"{goal} reached after {duration(reached_s)}, {text} at the end"
    if not short or target:
        text += f" after {duration(run.summary['training_s'])}"
    if not target:
        return text
    goal = rough_accuracy(target["accuracy"], run.accuracy_name)
    return f"{text}; the target of {goal} was missed"


def ending_words(run: LoadedRun) -> str:
    """How the run failed, as the begin of a sentence; empty if it succeeded."""
    ending = run.summary["ending"]
    if ending["succeeded"]:
        return ""
    if ending["stop_reason"] == UNFINISHED:
        return "Still running, or killed"
    if ending["reason"] == EndReason.PARTIAL:
        return f"Partial: the model lacks {_missing(run)}"
    return _FAILURES.get(ending["reason"], "Failed")


def _first_sentence(run: LoadedRun) -> str:
    failure = ending_words(run)
    text = f"{setting(run.job)}: {result(run)}{_quarantined(run)}"
    return f"{failure}. {text}" if failure else text


def _quarantined(run: LoadedRun) -> str:
    """Which workers the others have quarantined, as the end of a sentence."""
    names = [each["name"] for each in run.summary["workers"] if each["quarantine"]]
    if not names:
        return ""
    shown = " and ".join(names) if len(names) <= 2 else f"{_number(len(names))} workers"
    return f", with {shown} quarantined"


def _missing(run: LoadedRun) -> str:
    ranks = run.summary["ending"]["missing"]
    if not ranks:
        return "replicas"
    if len(ranks) > 2:
        return f"{_number(len(ranks))} of {_number(len(run.workers))} replicas"
    return " and ".join(run.worker_name(rank) for rank in ranks)


def _range_of(runs: Sequence[LoadedRun]) -> str:
    known = [run for run in runs if run.summary["accuracy"]["mean"] is not None]
    failed = sum(not run.summary["ending"]["succeeded"] for run in runs)
    count = _capitalised(f"{_number(len(runs))} runs")
    text = f"{count}: no replica was evaluated."
    if known:
        worst, best = (
            chosen(known, key=lambda run: float(run.summary["accuracy"]["mean"]))
            for chosen in (min, max)
        )
        name = common_name(run.accuracy_name for run in known)
        low, high = (rough_accuracy(run.summary["accuracy"]["mean"], name) for run in (worst, best))
        text = f"{count}: from {low} ({_label(worst)}) to {high} ({_label(best)})."
    return f"{text} {_capitalised(_number(failed))} did not succeed." if failed else text


def _contrasts(runs: Sequence[LoadedRun]) -> list[str | None]:
    """What distinguishes each run from the first; None for a first run that needs no words."""
    policies = [run.job.spec.exchange.policy for run in runs]
    differing = [differences([runs[0].job, run.job]) for run in runs[1:]]
    if policies.count("none") == 1 and all(set(d) <= {"exchange.policy"} for d in differing):
        words = [
            "Without exchange" if policy == "none" else f"With exchange ({policy})"
            for policy in policies
        ]
        return [None if policies[0] != "none" else words[0], *words[1:]]
    return [_label(run) for run in runs]


def differences(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """Settings in which the jobs differ, with the value of each; None where one has none.

    Names, labels and what ends a run are left out.
    """
    flat = [dict(_leaves(job.to_document()["spec"])) for job in jobs]
    names = dict.fromkeys(name for values in flat for name in values)
    rows = {name: [values.get(name) for values in flat] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row[1:])}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, without_queries(value) if isinstance(value, str) else value
        return
    for name, inner in value.items():
        if name not in _RUN_ENDS:
            yield from _leaves(inner, f"{path}.{name}" if path else name)


def _classes(job: Job) -> str:
    """The part of all classes at each site; empty if the manifest gives no disjoint classes."""
    classes = [set(site.classes) for site in job.spec.trainer.dataset.site_classes]
    if not classes or len(set.union(*classes)) != sum(map(len, classes)):
        return ""
    parts = {2: "half", 3: "a third", 4: "a quarter"}
    if len(classes) in parts and len({len(own) for own in classes}) == 1:
        return f"{parts[len(classes)]} of the classes"
    return "classes of its own"


def _label(run: LoadedRun) -> str:
    return f"“{shortened(run.label, _LABEL_LENGTH)}”"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _uncapitalised(text: str) -> str:
    return text[:1].lower() + text[1:]
