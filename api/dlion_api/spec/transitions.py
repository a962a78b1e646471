"""Which changes of a manifest are allowed during its run.

Before a run's workers train, every field may change, and the operator recreates the run's objects.
So a wrong manifest is corrected with the same `runId`, by the same commit at every site. Afterwards
workers must agree on how they train, so most of the spec is fixed until `runId` changes, which it
may once the run has ended. Counts, deadlines, suspension and the checkpoint interval may always
change.

The rules are at the root of the CRD, where CEL can read `status.trainingStartTime`. The order of a
list matters, as in the hash by which sites compare manifests. CEL ignores the order of lists that
are sets or maps, unless they are mapped first. `podTemplate`, of the job or of a group, has no
schema that CEL could compare; its documentation states when a change takes effect.
"""

from dlion_api.document import TransitionRule

RUN_TRAINS_CEL = (
    "has(oldSelf.status) && has(oldSelf.status.trainingStartTime) && has(oldSelf.status.runId) &&"
    " oldSelf.status.runId == oldSelf.spec.runId"
)
RUN_ENDED_CEL = (
    "has(oldSelf.status) && has(oldSelf.status.conditions) && oldSelf.status.conditions.exists("
    "c, (c.type == 'Succeeded' || c.type == 'Failed') && c.status == 'True')"
)


def _unchanged(name: str, *ordered: str) -> TransitionRule:
    """Return the rule that a field of the spec is fixed while its run trains.

    `ordered`: parts whose order CEL would ignore (`{}` is the spec).
    """
    same = [f"self.spec.{name} == oldSelf.spec.{name}"]
    same += [f"{text.format('self.spec')} == {text.format('oldSelf.spec')}" for text in ordered]
    either = same[0] if len(same) == 1 else f"({' && '.join(same)})"
    return TransitionRule(
        cel=f"!({RUN_TRAINS_CEL}) || self.spec.runId != oldSelf.spec.runId || {either}",
        message=f"once its workers train, {name} may change only together with runId",
        path=f"spec.{name}",
    )


_SAME_PLACES = " && ".join(
    f"self.spec.sites.map(s, {each}) == oldSelf.spec.sites.map(s, {each})"
    for each in (
        "s.name",
        "s.groups.map(g, g.name)",
        "s.groups.map(g, g.image)",
        "s.groups.map(g, g.resources)",
        "s.groups.map(g, g.nodeSelector)",
    )
)

JOB_TRANSITIONS = (
    _unchanged(
        "trainer",
        "{}.trainer.freeze.map(v, v)",
        "{}.trainer.dataset.keepClasses.map(c, c)",
        "{}.trainer.dataset.siteClasses.map(s, s.site)",
        "{}.trainer.dataset.siteClasses.map(s, s.classes.map(c, c))",
    ),
    *map(
        _unchanged,
        (
            "batching",
            "exchange",
            "synchronization",
            "knowledgeTransfer",
            "network",
            "tls",
            "managedBy",
        ),
    ),
    # CEL ignores the order of `onEnds` and `groups`, which has no meaning.
    _unchanged("failureRules"),
    TransitionRule(
        cel=f"!({RUN_TRAINS_CEL}) || self.spec.runId != oldSelf.spec.runId || ({_SAME_PLACES})",
        message="once its workers train, of sites only the number of workers may change without"
        " runId",
        path="spec.sites",
    ),
    TransitionRule(
        cel=f"self.spec.runId == oldSelf.spec.runId || !({RUN_TRAINS_CEL}) || ({RUN_ENDED_CEL})",
        message="once its workers train, runId may change only after the job has succeeded or"
        " failed",
        path="spec.runId",
    ),
)
