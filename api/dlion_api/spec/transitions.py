"""What may change in a manifest while its run lasts.

Child Jobs are made once per run and their templates cannot change, and workers of one run must
agree on how they train. So most of the spec stands until `runId` changes, which it may once the
run has ended. Counts, deadlines, suspension and the checkpoint interval may change at any time.
The order of a list counts, as it does in the hash by which sites compare their manifests; CEL takes
lists that are sets or maps as equal in any order, unless they are mapped first.
(`podTemplate` has no schema that CEL could compare; its documentation says when a change acts.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlion_api.document import TransitionRule
from dlion_api.errors import Problem

if TYPE_CHECKING:
    from dlion_api.spec.job import Job


def _stands(name: str, attribute: str, *ordered: str) -> TransitionRule:
    """`ordered`: what is equal for CEL in any order (`{}` is the spec), and is not for us."""
    same = [f"self.{name} == oldSelf.{name}"]
    same += [f"{text.format('self')} == {text.format('oldSelf')}" for text in ordered]
    either = same[0] if len(same) == 1 else f"({' && '.join(same)})"
    return TransitionRule(
        cel=f"self.runId != oldSelf.runId || {either}",
        message=f"{name} may change only together with runId",
        holds=lambda old, new: (
            old.run_id != new.run_id or getattr(old, attribute) == getattr(new, attribute)
        ),
        path=name,
    )


def _places(spec: Any) -> list[Any]:
    return [
        (site.name, [(g.name, g.resources, g.node_selector) for g in site.groups])
        for site in spec.sites
    ]


SPEC_TRANSITIONS = (
    _stands(
        "trainer",
        "trainer",
        "{}.trainer.freeze.map(v, v)",
        "{}.trainer.dataset.keepClasses.map(c, c)",
        "{}.trainer.dataset.siteClasses.map(s, s.site)",
        "{}.trainer.dataset.siteClasses.map(s, s.classes.map(c, c))",
    ),
    _stands("batching", "batching"),
    _stands("exchange", "exchange"),
    _stands("synchronization", "synchronization"),
    _stands("knowledgeTransfer", "knowledge_transfer"),
    _stands("network", "network"),
    _stands("tls", "tls"),
    _stands("managedBy", "managed_by"),
    TransitionRule(
        cel="self.runId != oldSelf.runId ||"
        " (self.sites.map(s, s.name) == oldSelf.sites.map(s, s.name) &&"
        " self.sites.map(s, s.groups.map(g, g.name)) =="
        " oldSelf.sites.map(s, s.groups.map(g, g.name)) &&"
        " self.sites.map(s, s.groups.map(g, g.resources)) =="
        " oldSelf.sites.map(s, s.groups.map(g, g.resources)) &&"
        " self.sites.map(s, s.groups.map(g, g.nodeSelector)) =="
        " oldSelf.sites.map(s, s.groups.map(g, g.nodeSelector)))",
        message="of sites only the number of workers may change without runId",
        holds=lambda old, new: old.run_id != new.run_id or _places(old) == _places(new),
        path="sites",
    ),
)

RUN_ENDED_CEL = (
    "has(oldSelf.status) && has(oldSelf.status.conditions) && oldSelf.status.conditions.exists("
    "c, (c.type == 'Succeeded' || c.type == 'Failed') && c.status == 'True')"
)

JOB_TRANSITIONS = (
    TransitionRule(
        cel=f"self.spec.runId == oldSelf.spec.runId || ({RUN_ENDED_CEL})",
        message="runId may change only after the job has succeeded or failed",
        holds=lambda old, new: old.spec.run_id == new.spec.run_id,  # while the run lasts
        path="spec.runId",
    ),
)


def change_problems(old: Job, new: Job, *, run_ended: bool) -> list[Problem]:
    """Why the manifest may not change from one to the other; empty: it may.

    Equals what the API server's rules say, for where there is none to ask.
    """
    checked: list[tuple[str, TransitionRule, Any, Any]] = [
        ("spec", rule, old.spec, new.spec) for rule in SPEC_TRANSITIONS
    ]
    if not run_ended:
        checked += [("", rule, old, new) for rule in JOB_TRANSITIONS]
    return [
        Problem(f"{root}.{rule.path}".lstrip("."), rule.message)
        for root, rule, before, after in checked
        if not rule.holds(before, after)
    ]
