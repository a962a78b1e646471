"""Wire messages made into statements, and statements into wire messages.

Owns the limits of every field: what another site's operator sends is untrusted input, checked
whole before anything is made of it. Called by the gRPC skin alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from dlion_api.errors import ContractError
from dlion_api.membership import Member, MemberState
from dlion_api.names import DNS_LABEL, JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.refusals import MAX_TEXT_BYTES
from dlion_api.spec.bounds import (
    GROUP_NAME_LENGTH,
    INT32_MAX,
    JOB_NAME_LENGTH,
    MOST_SITES,
    MOST_WORKERS,
    RUN_ID_LENGTH,
    SITE_NAME_LENGTH,
)
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.authority_bundles import MAX_RUN_BUNDLE_BYTES
from dlion_operator.federation.reports import (
    FIELD_HASH_BYTES,
    MAX_FIELDS,
    MAX_PATH_BYTES,
    MAX_WORKERS,
    Beat,
    Figures,
    LinksTo,
    Said,
    SaidGone,
    SiteWorkers,
    SpecPrint,
    Statement,
)

MAX_STATEMENT_BYTES = 4 * 1024 * 1024
"""Of the largest site: 8 groups of 999 workers with the longest addresses are sent in less."""
MAX_COUNTER = 2**53
MAX_RANK = 2**31 - 1
HASH_BYTES = 32
NAMESPACE_LENGTH = 63

_RUN = re.compile(
    rf"([a-z0-9-]{{1,{NAMESPACE_LENGTH}}})/([a-z0-9-]{{1,{JOB_NAME_LENGTH}}})"
    rf"#([a-z0-9-]{{1,{RUN_ID_LENGTH}}})"
)


def greeting(own: SiteName, to_site: SiteName) -> wire.Statement:
    """What a stream begins with."""
    return wire.Statement(greeting=wire.Greeting(site=own, to_site=to_site))


def greeting_of(message: wire.Statement) -> tuple[SiteName, SiteName]:
    """Who speaks, and whom it takes this site for.

    Raises:
        ContractError: that is no greeting.
    """
    if message.WhichOneof("what") != "greeting":
        raise ContractError(f"a stream begins with a greeting, not {message.WhichOneof('what')}")
    said = message.greeting
    return _site(said.site), _site(said.to_site)


def claims_of(chunk: wire.LinkChunk) -> tuple[SiteName, SiteName]:
    """Who measures, and whom it takes this site for: of the first chunk.

    Raises:
        ContractError: a name is none.
    """
    return _site(chunk.site), _site(chunk.to_site)


def statement_of(message: wire.Statement, site: SiteName) -> Statement:
    """What that site said.

    Raises:
        ContractError: a field is out of bounds, or none that the protocol knows.
    """
    match message.WhichOneof("what"):
        case "run":
            return _said(message.run, site)
        case "gone":
            return SaidGone(_run(message.gone.run))
        case "heartbeat":
            return Beat()
        case other:
            raise ContractError(f"a statement of kind {other}; allowed: run, gone, heartbeat")


def to_wire(statement: Statement) -> wire.Statement:
    """That statement, as a stream carries it."""
    match statement:
        case Said():
            return wire.Statement(run=_report(statement))
        case SaidGone(run):
            return wire.Statement(gone=wire.RunGone(run=str(run)))
        case Beat():
            return wire.Statement(heartbeat=wire.Heartbeat())


# ---- what comes in ----------------------------------------------------------------------------


def _said(report: wire.RunReport, site: SiteName) -> Said:
    return Said(
        _run(report.run),
        _spec(report.spec) if report.HasField("spec") else None,
        _workers(report.workers, site) if report.HasField("workers") else None,
        _figures(report.figures) if report.HasField("figures") else None,
        _bundle(report.bundle_pem) if report.HasField("bundle_pem") else None,
    )


def _spec(spec: wire.RunSpec) -> SpecPrint:
    if len(spec.spec_hash) != HASH_BYTES:
        raise ContractError(f"hash of {len(spec.spec_hash)} bytes; allowed: {HASH_BYTES}")
    if len(spec.fields) > MAX_FIELDS:
        raise ContractError(f"{len(spec.fields)} fields; allowed: {MAX_FIELDS}")
    for path, value in spec.fields.items():
        _short("path of a field", path, MAX_PATH_BYTES)
        if not path.isprintable() or len(value) != FIELD_HASH_BYTES:
            raise ContractError(f"field {path!r:.80}: not a printable path and a hash")
    fields, defaults = dict(spec.fields), frozenset(spec.defaults)
    if len(spec.defaults) > len(fields) or not defaults <= fields.keys():
        raise ContractError("defaults: a path twice, or one that is not among the fields")
    # One text for a path, however often it was sent.
    return SpecPrint(spec.spec_hash.hex(), fields, frozenset(p for p in fields if p in defaults))


def _workers(workers: wire.RunWorkers, site: SiteName) -> SiteWorkers:
    for name, count in (("wanted", len(workers.wanted)), ("members", len(workers.members))):
        if count > MAX_WORKERS:
            raise ContractError(f"{name}: {count} workers; allowed: {MAX_WORKERS}")
    wanted = tuple(_identity(place, site) for place in workers.wanted)
    members = tuple(_member(member, site) for member in workers.members)
    _unique("wanted", wanted)
    _unique("members", [member.identity for member in members])
    accuracies = {
        Rank(member.place.rank): _fraction(member.accuracy)
        for member in workers.members
        if member.HasField("accuracy")
    }
    if len(workers.left) > MAX_WORKERS:
        raise ContractError(f"left: {len(workers.left)} workers; allowed: {MAX_WORKERS}")
    left = frozenset(map(_rank, workers.left))
    return SiteWorkers(wanted, members, workers.settled, accuracies, left)


def _identity(place: wire.WorkerPlace, site: SiteName) -> WorkerIdentity:
    is_name = DNS_LABEL.fullmatch(place.group) and len(place.group) <= GROUP_NAME_LENGTH
    if not is_name or place.index >= MOST_WORKERS:
        raise ContractError(
            f"worker {place.group!r:.80}, index {place.index}; allowed: a group's name, an index"
            f" below {MOST_WORKERS}"
        )
    return WorkerIdentity(_rank(place.rank), site, place.group, place.index)


def _rank(number: int) -> Rank:
    if number > MAX_RANK:
        raise ContractError(f"rank {number}; allowed: up to {MAX_RANK}")
    return Rank(number)


def _member(member: wire.SiteMember, site: SiteName) -> Member:
    identity = _identity(member.place, site)
    if member.state not in set(MemberState):
        raise ContractError(f"{identity.name}: state {member.state!r:.80}")
    if member.incarnation > MAX_COUNTER:
        raise ContractError(f"{identity.name}: incarnation {member.incarnation}")
    _short("exchange_address", member.exchange_address)
    _short("measuring_address", member.measuring_address)
    return Member(
        identity,
        member.incarnation,
        MemberState(member.state),
        member.exchange_address,
        member.measuring_address,
    )


def _figures(figures: wire.RunFigures) -> Figures:
    rate = figures.samples_per_s
    if not math.isfinite(rate) or rate < 0.0 or figures.iteration > MAX_COUNTER:
        raise ContractError(f"iteration {figures.iteration}, {rate} samples/s")
    if len(figures.links) > MOST_SITES:
        raise ContractError(f"links to {len(figures.links)} sites; allowed: {MOST_SITES}")
    links = tuple(map(_links_to, figures.links))
    if len({each.site for each in links}) < len(links):
        raise ContractError("links to a site twice")
    return Figures(figures.training, figures.iteration, rate, links)


def _links_to(links: wire.LinksTo) -> LinksTo:
    rate, site = links.bytes_per_s, _site(links.site)
    if not 0.0 <= rate <= MAX_COUNTER or max(links.connected, links.expected) > INT32_MAX:
        raise ContractError(
            f"links to {site}: {links.connected} of {links.expected}, {rate} bytes/s; allowed:"
            f" up to {INT32_MAX} links, {MAX_COUNTER} bytes/s"
        )
    return LinksTo(site, links.connected, links.expected, rate)


def _bundle(content: bytes) -> bytes:
    """Whatever stands there is judged by whoever uses it: it may be a user's mistake in one run."""
    if len(content) > MAX_RUN_BUNDLE_BYTES:
        raise ContractError(f"bundle_pem: {len(content)} bytes; allowed: {MAX_RUN_BUNDLE_BYTES}")
    return content


def _fraction(value: float) -> float:
    if not 0.0 <= value <= 1.0:  # nor NaN
        raise ContractError(f"accuracy {value}; allowed: 0 to 1")
    return value


def _unique(name: str, workers: Iterable[WorkerIdentity]) -> None:
    workers = tuple(workers)
    places = {(worker.group, worker.index) for worker in workers}
    if not len({worker.rank for worker in workers}) == len(places) == len(workers):
        raise ContractError(f"{name}: a worker or a rank stands twice")


def _run(text: str) -> JobKey:
    found = _RUN.fullmatch(text)
    if found is None:
        raise ContractError(f"run {text!r:.80}; allowed: namespace/name#runId")
    return JobKey(*found.groups())


def _site(name: str) -> SiteName:
    if not DNS_LABEL.fullmatch(name) or len(name) > SITE_NAME_LENGTH:
        raise ContractError(f"site {name!r:.80}; allowed: a site's name")
    return SiteName(name)


def _short(name: str, text: str, limit: int = MAX_TEXT_BYTES) -> None:
    if len(text.encode()) > limit:
        raise ContractError(f"{name} of {len(text)} characters; allowed: {limit} bytes")


# ---- what goes out ----------------------------------------------------------------------------


def _report(said: Said) -> wire.RunReport:
    report = wire.RunReport(run=str(said.run))
    if said.spec is not None:
        report.spec.CopyFrom(_wire_spec(said.spec))
    if said.workers is not None:
        report.workers.CopyFrom(_wire_workers(said.workers))
    if said.figures is not None:
        figures = said.figures
        report.figures.CopyFrom(
            wire.RunFigures(
                training=figures.training,
                iteration=figures.iteration,
                samples_per_s=figures.samples_per_s,
                links=[
                    wire.LinksTo(
                        site=each.site,
                        connected=each.connected,
                        expected=each.expected,
                        bytes_per_s=each.bytes_per_s,
                    )
                    for each in figures.links
                ],
            )
        )
    if said.bundle_pem is not None:
        report.bundle_pem = said.bundle_pem
    return report


def _wire_spec(spec: SpecPrint) -> wire.RunSpec:
    return wire.RunSpec(
        spec_hash=bytes.fromhex(spec.spec_hash),
        fields=dict(spec.fields),
        defaults=sorted(spec.defaults),
    )


def _wire_workers(workers: SiteWorkers) -> wire.RunWorkers:
    return wire.RunWorkers(
        wanted=[_place(worker) for worker in workers.wanted],
        members=[_wire_member(member, workers.accuracies) for member in workers.members],
        settled=workers.settled,
        left=sorted(workers.left),
    )


def _wire_member(member: Member, accuracies: Mapping[Rank, float]) -> wire.SiteMember:
    return wire.SiteMember(
        place=_place(member.identity),
        incarnation=member.incarnation,
        state=member.state.value,
        exchange_address=member.exchange_address,
        measuring_address=member.measuring_address,
        accuracy=accuracies.get(member.identity.rank),
    )


def _place(worker: WorkerIdentity) -> wire.WorkerPlace:
    return wire.WorkerPlace(rank=worker.rank, group=worker.group, index=worker.index)
