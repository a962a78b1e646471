"""CA bundles of other sites, read from files that may change.

An unreadable or invalid file is reported as a problem; its last valid content stays in use until
it expires.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.pki.authority_bundles import parse_authorities
from dlion_operator.pki.certificate_issuer import pem

MAX_BUNDLE_BYTES = 64 * 1024
ADVICE = "; put the output of `dlion trust show` at that site there"
STALE_BUNDLE_NOTE = "; the previous bundle stays in use until this operator restarts"


class Bundles:
    """The bundle (PEM) of each other site."""

    def __init__(self, files: Mapping[SiteName, Path]) -> None:
        """Read nothing yet."""
        self._files = dict(files)
        self.pems: Mapping[SiteName, bytes] = {}
        """Trusted bundles: each file's content, or its last valid content."""
        self.problems: Mapping[SiteName, str] = {}
        """For each invalid file: what is wrong and what to do."""

    def reload(self, *, now: datetime | None = None) -> bool:
        """Read every file; return whether anything has changed. Expired bundles are dropped."""
        at = now or datetime.now(UTC)
        pems: dict[SiteName, bytes] = {}
        problems: dict[SiteName, str] = {}
        for site, path in self._files.items():
            bundle, problem = self.pems.get(site, b""), ""
            try:
                bundle = _bundle(path)
            except ContractError as error:
                problem = str(error)
            if bundle and at >= (ends := _ends(bundle)):
                bundle = b""
                problem = problem or f"bundle {path} expired on {ends:%Y-%m-%d}{ADVICE}"
            if bundle:
                pems[site] = bundle
            if problem:
                problems[site] = problem + (STALE_BUNDLE_NOTE if bundle else "")
        has_changed = (pems, problems) != (self.pems, self.problems)
        self.pems, self.problems = pems, problems
        return has_changed


def _bundle(path: Path) -> bytes:
    """Raises: ContractError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise ContractError(f"bundle {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BUNDLE_BYTES:
        raise ContractError(f"bundle {path} is longer than {MAX_BUNDLE_BYTES} bytes")
    try:
        certificates = parse_authorities(content)
    except ContractError as error:
        raise ContractError(f"bundle {path} {error}{ADVICE}") from error
    return pem(*certificates)  # drops anything else in the file, such as a private key


def _ends(bundle: bytes) -> datetime:
    """Return when its last certificate expires."""
    return max(each.not_valid_after_utc for each in parse_authorities(bundle))
