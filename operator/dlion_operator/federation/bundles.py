"""The public certificates by which other sites are known, read from files that may change.

A file that cannot be read, or holds no bundle, changes nothing but says why: what it held before
stands until that has run out. Knows no gRPC and no clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.authority_bundles import authorities_in
from dlion_operator.issuing import pem

MAX_BUNDLE_BYTES = 64 * 1024
ADVICE = "; put there what `dlion trust show` says at that site"
STANDS = "; the bundle of before stands until this operator starts anew"


class Bundles:
    """Each other site's bundle, PEM, as it stands in its file."""

    def __init__(self, files: Mapping[SiteName, Path]) -> None:
        """Nothing is read yet."""
        self._files = dict(files)
        self.pems: Mapping[SiteName, bytes] = {}
        """Those that are believed: as the file is, or else as it was when it last would do."""
        self.problems: Mapping[SiteName, str] = {}
        """Of files that will not do: why not, and what to do."""

    def reload(self, *, now: datetime | None = None) -> bool:
        """Reads every file; whether anything is other than it was. A site is no longer believed
        when its bundle has run out, by what is in the file or was there before."""
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
                problem = problem or f"bundle {path} has run out on {ends:%Y-%m-%d}{ADVICE}"
            if bundle:
                pems[site] = bundle
            if problem:
                problems[site] = problem + (STANDS if bundle else "")
        is_other = (pems, problems) != (self.pems, self.problems)
        self.pems, self.problems = pems, problems
        return is_other


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
        certificates = authorities_in(content)
    except ContractError as error:
        raise ContractError(f"bundle {path} {error}{ADVICE}") from error
    return pem(*certificates)  # and nothing else that may stand in the file, a key least of all


def _ends(bundle: bytes) -> datetime:
    """When the last of its certificates does."""
    return max(each.not_valid_after_utc for each in authorities_in(bundle))
