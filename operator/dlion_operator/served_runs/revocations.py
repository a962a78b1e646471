"""What is revoked in one run at this site, and what follows for its workers. Pure.

A site decides about its own workers, everywhere. About workers of other sites it decides for itself
only: a site that is taken over must not shut others out.
"""

from collections.abc import Iterable, Mapping

from dlion_api.names import SiteName, WorkerIdentity
from dlion_api.protocol.accusations import quarantine_message
from dlion_api.protocol.revocation import (
    MAX_REVOCATIONS,
    Revocation,
    RevocationInEffect,
    revocation_of,
)
from dlion_operator.federation.reports import RunReport
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.served_runs.worker_events import WORKER_RESTORED, WORKER_REVOKED


class RunRevocations:
    """The revocations of one run, by the site that made them."""

    def __init__(self, own: SiteName, kept: Iterable[RevocationInEffect]) -> None:
        """`kept`: those in the status. Other sites' count until these report."""
        self._own = own
        self._by_site: dict[SiteName, tuple[Revocation, ...]] = {}
        self._trusted: frozenset[str] = frozenset()
        """Names that the annotation excludes from quarantine."""
        self._quarantines: dict[str, Revocation] = {}
        """Quarantines made by this operator, by name."""
        self._reported = tuple(kept)
        """Revocations that events have reported."""
        for each in self._reported:
            if each.by == own and each.is_automatic:
                self._quarantines[each.name] = Revocation(each.name, each.reason)
            elif each.by != own:
                known = self._by_site.get(each.by, ())
                self._by_site[each.by] = (*known, Revocation(each.name, each.reason))

    @property
    def own(self) -> tuple[Revocation, ...]:
        """Revocations made at this site, for the others, which refuse a longer list."""
        by_people = self._by_site.get(self._own, ())
        return (*by_people, *self._quarantined(by_people))[:MAX_REVOCATIONS]

    def _quarantined(self, by_people: Iterable[Revocation]) -> list[Revocation]:
        others = self._trusted | {each.name for each in by_people}
        return [each for name, each in self._quarantines.items() if name not in others]

    def set_own(self, revocations: Iterable[Revocation]) -> None:
        """Set what the job's annotation has. It ends a quarantine of the same name: what people
        have revoked or lifted themselves is theirs to lift."""
        given = tuple(revocations)
        for each in given:
            self._quarantines.pop(each.name, None)
        self._by_site[self._own] = tuple(each for each in given if not each.is_lifted)
        self._trusted = frozenset(each.name for each in given if each.is_lifted)

    def quarantine(self, name: str, reason: str) -> bool:
        """Revoke a worker at this site. Return False where people have decided otherwise, or the
        same."""
        if name in self._trusted or any(each.name == name for each in self.own):
            return False
        self._quarantines[name] = Revocation(name, reason)
        return True

    def set_remote(self, reports: Mapping[SiteName, RunReport]) -> None:
        """Take what other sites report. Of a site without a report, the last one stays."""
        for site, report in reports.items():
            self._by_site[site] = report.revocations

    def all(self) -> tuple[RevocationInEffect, ...]:
        """All of them, by name."""
        found = [
            RevocationInEffect(
                each.name, each.reason, by=site, is_effective=site in (self._own, each.site)
            )
            for site, revocations in self._by_site.items()
            for each in revocations
        ]
        found += [
            RevocationInEffect(each.name, each.reason, by=self._own, is_automatic=True)
            for each in self._quarantined(self._by_site.get(self._own, ()))
        ]
        return tuple(sorted(found, key=lambda each: (each.name, each.by)))

    def effective(self) -> tuple[RevocationInEffect, ...]:
        """Revocations in effect at this site."""
        return tuple(each for each in self.all() if each.is_effective)

    def without_revoked(self, workers: Iterable[WorkerIdentity]) -> tuple[WorkerIdentity, ...]:
        """The workers that none covers here."""
        effective = self.effective()
        return tuple(each for each in workers if revocation_of(effective, each) is None)

    def changes(self) -> tuple[JobEvent, ...]:
        """Events on what has changed since the last call."""
        before, now = self._reported, self._reported = self._reported, self.all()
        key_before = {(each.name, each.by) for each in before}
        key_now = {(each.name, each.by) for each in now}
        made = [each for each in now if (each.name, each.by) not in key_before]
        lifted = [each for each in before if (each.name, each.by) not in key_now]
        return (*map(_revoked, made), *map(_restored, lifted))


def _revoked(each: RevocationInEffect) -> JobEvent:
    why = f" ({each.reason})" if each.reason else ""
    if each.is_automatic:
        message = quarantine_message(each.name, each.reason)
    elif each.is_effective:
        message = f"{each.name} is revoked at {each.by}{why}: no worker accepts it"
    else:
        message = (
            f"{each.by} refuses {each.name}{why}, and this site does not: revoke it here, too, or"
            f" at {each.site} for all sites"
        )
    return JobEvent(WORKER_REVOKED, message, "Warning")


def _restored(each: RevocationInEffect) -> JobEvent:
    return JobEvent(WORKER_RESTORED, f"{each.name} is trusted again at {each.by}")
