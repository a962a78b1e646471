"""Which changes of a manifest are allowed during its run.

Before a run's workers train, every field may change, and the operator recreates the run's objects.
So a wrong manifest is corrected with the same `runId`, by the same commit at every site. Afterwards
workers must agree on how they train, so most of the spec is fixed until `runId` changes, which it
may once the run has ended. Counts, deadlines, suspension and the checkpoint interval may always
change.

The rules are at the root of the CRD, where CEL can read `status.trainingStartTime`. The order of a
list matters, as in the hash by which sites compare manifests. CEL ignores the order of lists that
are sets or maps, unless they are mapped first. `podTemplate` has no schema that CEL could compare;
its documentation states when a change takes effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlion_api.document import TransitionRule
from dlion_api.errors import Problem

if TYPE_CHECKING:
    from dlion_api.spec.job import Job

RUN_TRAINS_CEL = (
    "has(oldSelf.status) && has(oldSelf.status.trainingStartTime) && has(oldSelf.status.runId) &&"
    " oldSelf.status.runId == oldSelf.spec.runId"
)
RUN_ENDED_CEL = (
    "has(oldSelf.status) && has(oldSelf.status.conditions) && oldSelf.status.conditions.exists("
    "c, (c.type == 'Succeeded' || c.type == 'Failed') && c.status == 'True')"
)


def _unchanged(name: str, attribute: str, *ordered: str) -> TransitionRule:
    """Return the rule that a field of the spec is fixed while its run trains.

    `ordered`: parts whose order CEL would ignore (`{}` is the spec).
    """
    same = [f"self.spec.{name} == oldSelf.spec.{name}"]
    same += [f"{text.format('self.spec')} == {text.format('oldSelf.spec')}" for text in ordered]
    either = same[0] if len(same) == 1 else f"({' && '.join(same)})"
    return TransitionRule(
        cel=f"!({RUN_TRAINS_CEL}) || self.spec.runId != oldSelf.spec.runId || {either}",
        message=f"once its workers train, {name} may change only together with runId",
        holds=lambda old, new: (
            old.spec.run_id != new.spec.run_id
            or getattr(old.spec, attribute) == getattr(new.spec, attribute)
        ),
        path=f"spec.{name}",
    )


def _places(spec: Any) -> list[Any]:
    return [
        (site.name, [(g.name, g.resources, g.node_selector) for g in site.groups])
        for site in spec.sites
    ]


_SAME_PLACES = " && ".join(
    f"self.spec.sites.map(s, {each}) == oldSelf.spec.sites.map(s, {each})"
    for each in (
        "s.name",
        "s.groups.map(g, g.name)",
        "s.groups.map(g, g.resources)",
        "s.groups.map(g, g.nodeSelector)",
    )
)

_SAME_RUN = (
    _unchanged(
        "trainer",
        "trainer",
        "{}.trainer.freeze.map(v, v)",
        "{}.trainer.dataset.keepClasses.map(c, c)",
        "{}.trainer.dataset.siteClasses.map(s, s.site)",
        "{}.trainer.dataset.siteClasses.map(s, s.classes.map(c, c))",
    ),
    _unchanged("batching", "batching"),
    _unchanged("exchange", "exchange"),
    _unchanged("synchronization", "synchronization"),
    _unchanged("knowledgeTransfer", "knowledge_transfer"),
    _unchanged("network", "network"),
    _unchanged("tls", "tls"),
    _unchanged("managedBy", "managed_by"),
    TransitionRule(
        cel=f"!({RUN_TRAINS_CEL}) || self.spec.runId != oldSelf.spec.runId || ({_SAME_PLACES})",
        message="once its workers train, of sites only the number of workers may change without"
        " runId",
        holds=lambda old, new: (
            old.spec.run_id != new.spec.run_id or _places(old.spec) == _places(new.spec)
        ),
        path="spec.sites",
    ),
)

_NEW_RUN = TransitionRule(
    cel=f"self.spec.runId == oldSelf.spec.runId || !({RUN_TRAINS_CEL}) || ({RUN_ENDED_CEL})",
    message="once its workers train, runId may change only after the job has succeeded or failed",
    holds=lambda old, new: old.spec.run_id == new.spec.run_id,  # while the run lasts
    path="spec.runId",
)

JOB_TRANSITIONS = (*_SAME_RUN, _NEW_RUN)


def change_problems(
    old: Job, new: Job, *, run_ended: bool, run_trains: bool = True
) -> list[Problem]:
    """Return why the manifest may not change from `old` to `new`; empty: it may.

    `run_trains`: whether the run's workers have started to train (`status.trainingStartTime`). Same
    rules as the API server's, for use without one.
    """
    if not run_trains:
        return []
    rules = _SAME_RUN if run_ended else JOB_TRANSITIONS
    return [Problem(rule.path, rule.message) for rule in rules if not rule.holds(old, new)]
