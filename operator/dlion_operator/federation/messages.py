"""Convert wire messages to statements and back.

Messages of other sites' operators are untrusted: every field is checked against its limit.
"""

import math
import re
from collections.abc import Iterable, Mapping

from dlion_api.bounds import (
    GROUP_NAME_LENGTH,
    INT32_MAX,
    JOB_NAME_LENGTH,
    MAX_SITES,
    MAX_WORKERS_PER_GROUP,
    RUN_ID_LENGTH,
    SITE_NAME_LENGTH,
)
from dlion_api.errors import ContractError
from dlion_api.names import DNS_LABEL, JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.protocol.revocation import (
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_REVOCATIONS,
    Revocation,
    clean_reason,
    is_revocable_name,
)
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.federation.reports import (
    FIELD_HASH_BYTES,
    MAX_FIELDS,
    MAX_PATH_BYTES,
    MAX_WORKERS,
    Heartbeat,
    LinksTo,
    ReportedWorkers,
    RunRemoved,
    RunReported,
    SpecFingerprint,
    Statement,
    TrainingFigures,
)
from dlion_operator.kubernetes.wire_parsing import MAX_COUNTER, check_length
from dlion_operator.pki.authority_bundles import MAX_RUN_BUNDLE_BYTES

MAX_STATEMENT_BYTES = 4 * 1024 * 1024
"""The largest site, 8 groups of 999 workers with the longest addresses, needs less."""
HASH_BYTES = 32
NAMESPACE_LENGTH = 63

_RUN = re.compile(
    rf"([a-z0-9-]{{1,{NAMESPACE_LENGTH}}})/([a-z0-9-]{{1,{JOB_NAME_LENGTH}}})"
    rf"#([a-z0-9-]{{1,{RUN_ID_LENGTH}}})"
)


def site_hello(own: SiteName, to_site: SiteName) -> wire.Statement:
    """Return the first message of a stream."""
    return wire.Statement(hello=wire.SiteHello(site=own, to_site=to_site))


def sites_of(message: wire.SiteHello | wire.LinkChunk) -> tuple[SiteName, SiteName]:
    """Return the claimed site of the caller and the site that it meant to reach.

    Raises: ContractError if a site's name is invalid.
    """
    return _site(message.site), _site(message.to_site)


def statement_of(message: wire.Statement, site: SiteName) -> Statement:
    """Parse a statement of that site. Raises: ContractError if a field is out of bounds."""
    match message.WhichOneof("what"):
        case "run":
            return _run_reported(message.run, site)
        case "gone":
            return RunRemoved(_run(message.gone.run))
        case "heartbeat":
            return Heartbeat()
        case other:
            raise ContractError(f"a statement of kind {other}; allowed: run, gone, heartbeat")


def to_wire(statement: Statement) -> wire.Statement:
    match statement:
        case RunReported():
            return wire.Statement(run=_report(statement))
        case RunRemoved(run):
            return wire.Statement(gone=wire.RunGone(run=str(run)))
        case Heartbeat():
            return wire.Statement(heartbeat=wire.Heartbeat())


# ---- incoming ---------------------------------------------------------------------------------


def _run_reported(report: wire.RunReport, site: SiteName) -> RunReported:
    return RunReported(
        _run(report.run),
        _spec(report.spec) if report.HasField("spec") else None,
        _workers(report.workers, site) if report.HasField("workers") else None,
        _figures(report.figures) if report.HasField("figures") else None,
        _bundle(report.bundle_pem) if report.HasField("bundle_pem") else None,
        _revocations(report.revocations) if report.HasField("revocations") else None,
    )


def _spec(spec: wire.RunSpec) -> SpecFingerprint:
    if len(spec.spec_hash) != HASH_BYTES:
        raise ContractError(f"hash of {len(spec.spec_hash)} bytes; allowed: {HASH_BYTES}")
    if len(spec.fields) > MAX_FIELDS:
        raise ContractError(f"{len(spec.fields)} fields; allowed: {MAX_FIELDS}")
    for path, value in spec.fields.items():
        check_length("path of a field", path, MAX_PATH_BYTES)
        if not path.isprintable() or len(value) != FIELD_HASH_BYTES:
            raise ContractError(f"field {path!r:.80}: not a printable path and a hash")
    fields, defaults = dict(spec.fields), frozenset(spec.defaults)
    if len(spec.defaults) > len(fields) or not defaults <= fields.keys():
        raise ContractError("defaults: a path twice, or one that is not among the fields")
    # Reuse the strings of `fields`, so that each path is stored once.
    return SpecFingerprint(
        spec.spec_hash.hex(), fields, frozenset(p for p in fields if p in defaults)
    )


def _workers(workers: wire.RunWorkers, site: SiteName) -> ReportedWorkers:
    for name in ("wanted", "members", "left"):
        if (count := len(getattr(workers, name))) > MAX_WORKERS:
            raise ContractError(f"{name}: {count} workers; allowed: {MAX_WORKERS}")
    wanted = tuple(_identity(place, site) for place in workers.wanted)
    members = tuple(_member(member, site) for member in workers.members)
    _unique("wanted", wanted)
    _unique("members", [member.identity for member in members])
    accuracies = {
        Rank(member.place.rank): member.accuracy
        for member in workers.members
        if member.HasField("accuracy")
    }
    for value in accuracies.values():
        if not 0.0 <= value <= 1.0:  # nor NaN
            raise ContractError(f"accuracy {value}; allowed: 0 to 1")
    left = frozenset(map(_rank, workers.left))
    return ReportedWorkers(wanted, members, workers.settled, accuracies, left)


def _identity(place: wire.WorkerPlace, site: SiteName) -> WorkerIdentity:
    is_name = DNS_LABEL.fullmatch(place.group) and len(place.group) <= GROUP_NAME_LENGTH
    if not is_name or place.index >= MAX_WORKERS_PER_GROUP:
        raise ContractError(
            f"worker {place.group!r:.80}, index {place.index}; allowed: a group's name, an index"
            f" below {MAX_WORKERS_PER_GROUP}"
        )
    return WorkerIdentity(_rank(place.rank), site, place.group, place.index)


def _rank(number: int) -> Rank:
    if number > INT32_MAX:
        raise ContractError(f"rank {number}; allowed: up to {INT32_MAX}")
    return Rank(number)


def _member(member: wire.SiteMember, site: SiteName) -> Member:
    identity = _identity(member.place, site)
    if member.state not in set(MemberState):
        raise ContractError(f"{identity.name}: state {member.state!r:.80}")
    if member.incarnation > MAX_COUNTER:
        raise ContractError(f"{identity.name}: incarnation {member.incarnation}")
    check_length("exchange_address", member.exchange_address)
    check_length("measuring_address", member.measuring_address)
    return Member(
        identity,
        member.incarnation,
        MemberState(member.state),
        member.exchange_address,
        member.measuring_address,
    )


def _figures(figures: wire.RunFigures) -> TrainingFigures:
    rate = figures.samples_per_s
    if not math.isfinite(rate) or rate < 0.0 or figures.iteration > MAX_COUNTER:
        raise ContractError(f"iteration {figures.iteration}, {rate} samples/s")
    if len(figures.links) > MAX_SITES:
        raise ContractError(f"links to {len(figures.links)} sites; allowed: {MAX_SITES}")
    links = tuple(map(_links_to, figures.links))
    if len({each.site for each in links}) < len(links):
        raise ContractError("links to a site twice")
    return TrainingFigures(figures.training, figures.iteration, rate, links)


def _links_to(links: wire.LinksTo) -> LinksTo:
    rate, site = links.bytes_per_s, _site(links.site)
    if not 0.0 <= rate <= MAX_COUNTER or max(links.connected, links.expected) > INT32_MAX:
        raise ContractError(
            f"links to {site}: {links.connected} of {links.expected}, {rate} bytes/s; allowed:"
            f" up to {INT32_MAX} links, {MAX_COUNTER} bytes/s"
        )
    return LinksTo(site, links.connected, links.expected, rate)


def _bundle(content: bytes) -> bytes:
    """Check the size only: a user's mistake in one run's bundle must not refuse the stream."""
    if len(content) > MAX_RUN_BUNDLE_BYTES:
        raise ContractError(f"bundle_pem: {len(content)} bytes; allowed: {MAX_RUN_BUNDLE_BYTES}")
    return content


def _revocations(revocations: wire.RunRevocations) -> tuple[Revocation, ...]:
    if (count := len(revocations.revoked)) > MAX_REVOCATIONS:
        raise ContractError(f"{count} revocations; allowed: {MAX_REVOCATIONS}")
    names = [each.name for each in revocations.revoked]
    for name in names:
        check_length("name of a revocation", name, MAX_NAME_CHARACTERS)
        if not is_revocable_name(name):
            raise ContractError(f"revocation of {name!r:.80}; allowed: site, site/group-index")
    if len(set(names)) < len(names):
        raise ContractError("revocations: a name occurs twice")
    for each in revocations.revoked:
        check_length("reason of a revocation", each.reason, 4 * MAX_REASON_CHARACTERS)
    return tuple(Revocation(each.name, clean_reason(each.reason)) for each in revocations.revoked)


def _unique(name: str, workers: Iterable[WorkerIdentity]) -> None:
    workers = tuple(workers)
    places = {(worker.group, worker.index) for worker in workers}
    if not len({worker.rank for worker in workers}) == len(places) == len(workers):
        raise ContractError(f"{name}: a worker or a rank occurs twice")


def _run(text: str) -> JobKey:
    match = _RUN.fullmatch(text)
    if match is None:
        raise ContractError(f"run {text!r:.80}; allowed: namespace/name#runId")
    return JobKey(*match.groups())


def _site(name: str) -> SiteName:
    if not DNS_LABEL.fullmatch(name) or len(name) > SITE_NAME_LENGTH:
        raise ContractError(f"site {name!r:.80}; allowed: a site's name")
    return SiteName(name)


# ---- outgoing ---------------------------------------------------------------------------------


def _report(reported: RunReported) -> wire.RunReport:
    """Convert a report. Protobuf leaves out a field that is None."""
    return wire.RunReport(
        run=str(reported.run),
        spec=_wire_spec(reported.spec) if reported.spec else None,
        workers=_wire_workers(reported.workers) if reported.workers else None,
        figures=_wire_figures(reported.figures) if reported.figures else None,
        bundle_pem=reported.bundle_pem,
        revocations=None if reported.revocations is None else _wire_revocations(reported),
    )


def _wire_revocations(reported: RunReported) -> wire.RunRevocations:
    revoked = reported.revocations or ()
    return wire.RunRevocations(
        revoked=[wire.RevokedName(name=each.name, reason=each.reason) for each in revoked]
    )


def _wire_figures(figures: TrainingFigures) -> wire.RunFigures:
    links = [wire.LinksTo(**vars(each)) for each in figures.links]  # of the same fields
    return wire.RunFigures(**vars(figures) | {"links": links})


def _wire_spec(spec: SpecFingerprint) -> wire.RunSpec:
    return wire.RunSpec(
        spec_hash=bytes.fromhex(spec.spec_hash),
        fields=dict(spec.fields),
        defaults=sorted(spec.defaults),
    )


def _wire_workers(workers: ReportedWorkers) -> wire.RunWorkers:
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
