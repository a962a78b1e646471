"""What may change in a manifest while its run lasts.

Until the workers of a run train, every field may change, and the operator makes the run's objects
again: a wrong manifest is corrected under the same `runId`, by the same commit at every site. From
then on workers must agree on how they train, so most of the spec stands until `runId` changes,
which it may once the run has ended. Counts, deadlines, suspension and the checkpoint interval may
change at any time.

The rules stand at the root of the CRD, where CEL sees `status.trainingStartTime`, which the
operator writes. The order of a list counts, as it does in the hash by which sites compare their
manifests; CEL takes lists that are sets or maps as equal in any order, unless they are mapped
first. (`podTemplate` has no schema that CEL could compare; its documentation says when a change
acts.)
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
    """A field of the spec that stands while its run trains.

    `ordered`: parts that CEL takes as equal in any order, and we do not (`{}` is the spec).
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
    """Why the manifest may not change from one to the other; empty: it may.

    `run_trains`: whether the workers of the run have begun to train (`status.trainingStartTime`).
    Equals what the API server's rules say, for where there is none to ask.
    """
    if not run_trains:
        return []
    rules = _SAME_RUN if run_ended else JOB_TRANSITIONS
    return [Problem(rule.path, rule.message) for rule in rules if not rule.holds(old, new)]
