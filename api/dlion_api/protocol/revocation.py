"""Revocations: workers and sites that a job's administrators no longer let take part.

`dlion trust revoke` writes them to an annotation of the job, the operators act on them and pass
them on. Text of users and of other sites is checked here. Pure.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlion_api.bounds import GROUP_NAME_LENGTH, SITE_NAME_LENGTH
from dlion_api.names import SiteName, WorkerIdentity

MAX_REVOCATIONS = 256
"""The maximum for one job at one site. A whole site needs one."""
MAX_REASON_CHARACTERS = 200
MAX_NAME_CHARACTERS = SITE_NAME_LENGTH + GROUP_NAME_LENGTH + 5
MAX_DOCUMENT_BYTES = 256 * 1024
"""All annotations of an object of Kubernetes have this many together."""

_NAME = re.compile(
    rf"[a-z0-9]([-a-z0-9]{{0,{SITE_NAME_LENGTH - 2}}}[a-z0-9])?"
    rf"(/[a-z0-9]([-a-z0-9]{{0,{GROUP_NAME_LENGTH - 2}}}[a-z0-9])?-(0|[1-9][0-9]{{0,2}}))?"
)


@dataclass(frozen=True)
class Revocation:
    """One worker, or all of a site's."""

    name: str
    """`site/group-index` or `site`."""
    reason: str = ""
    """The reason for people, on one line."""
    is_lifted: bool = False
    """Whether it is the contrary: a quarantine (`exchange.quarantine`) is lifted."""

    @property
    def site(self) -> SiteName:
        """The site of the worker, or the site itself.

        >>> Revocation("plant-b/large-0").site
        'plant-b'
        """
        return SiteName(self.name.partition("/")[0])

    def covers(self, worker: WorkerIdentity) -> bool:
        return not self.is_lifted and self.name in (worker.site, worker.name)


@dataclass(frozen=True)
class RevocationInEffect(Revocation):
    """A revocation, and where it was made."""

    by: SiteName = field(kw_only=True)
    is_effective: bool = field(default=True, kw_only=True)
    """Whether it acts at this site. Another site decides about its own workers only."""
    is_automatic: bool = field(default=False, kw_only=True)
    """Whether that site's operator made it (`exchange.quarantine`)."""


def is_revocable_name(text: str) -> bool:
    """Whether the text may name a worker or a site.

    >>> [is_revocable_name(text) for text in ("plant-b", "plant-b/large-0", "plant-b/", "../x-0")]
    [True, True, False, False]
    """
    return bool(_NAME.fullmatch(text))


def clean_reason(text: object) -> str:
    """Return a reason as one printable line of bounded length.

    >>> clean_reason("stolen\\x1b[2J on Monday\\n")
    'stolen?[2J on Monday?'
    """
    shown = "".join(each if each.isprintable() else "?" for each in str(text or ""))
    return shown[:MAX_REASON_CHARACTERS]


def revocation_of(revocations: Iterable[Revocation], worker: WorkerIdentity) -> Revocation | None:
    """Return the first of them that covers that worker."""
    return next((each for each in revocations if each.covers(worker)), None)


def parse_revocations(text: str) -> tuple[tuple[Revocation, ...], str]:
    """Return what an annotation revokes, by name, and what is wrong with it (empty: nothing).

    Each valid entry counts, whatever the others are: a mistake must not lift the rest.

    >>> parse_revocations('[{"name": "plant-b", "reason": "stolen"}]')
    ((Revocation(name='plant-b', reason='stolen', is_lifted=False),), '')
    """
    if not text:
        return (), ""
    if len(text) > MAX_DOCUMENT_BYTES:
        return (), f"{len(text)} characters; allowed: {MAX_DOCUMENT_BYTES}"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        return (), f"not JSON: {error}"
    if not isinstance(entries, list):
        return (), f"a {type(entries).__name__}; allowed: a list of objects with `name`"
    found: dict[str, Revocation] = {}
    problem = ""
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not is_revocable_name(name):
            problem = problem or f"entry {clean_reason(entry)!r:.80}: no name of a worker or site"
        elif len(found) >= MAX_REVOCATIONS and name not in found:
            problem = problem or f"more than {MAX_REVOCATIONS} entries; revoke the whole site"
        else:
            is_lifted = entry.get("trusted") is True
            found[name] = Revocation(name, clean_reason(entry.get("reason")), is_lifted)
    return tuple(found[name] for name in sorted(found)), problem


def to_annotation(revocations: Iterable[Revocation]) -> str:
    """Return them as `parse_revocations` reads them."""
    entries = [
        {"name": each.name}
        | ({"reason": each.reason} if each.reason else {})
        | ({"trusted": True} if each.is_lifted else {})
        for each in sorted(revocations, key=lambda each: each.name)
    ]
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
