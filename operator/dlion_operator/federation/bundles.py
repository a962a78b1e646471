"""The public certificates by which other sites are known, read from files that may change.

A file that will not do takes that site's trust away and says why; the others stand. Knows no
gRPC and no clock of its own.
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


class Bundles:
    """Each other site's bundle, PEM, as it stands in its file."""

    def __init__(self, files: Mapping[SiteName, Path]) -> None:
        """Nothing is read yet."""
        self._files = dict(files)
        self.pems: Mapping[SiteName, bytes] = {}
        """Those that will do."""
        self.problems: Mapping[SiteName, str] = {}
        """Of the others: why not, and what to do."""

    def reload(self, *, now: datetime | None = None) -> bool:
        """Reads every file; whether anything is other than it was."""
        pems: dict[SiteName, bytes] = {}
        problems: dict[SiteName, str] = {}
        for site, path in self._files.items():
            try:
                pems[site] = _bundle(path, now or datetime.now(UTC))
            except ContractError as error:
                problems[site] = str(error)
        is_other = (pems, problems) != (self.pems, self.problems)
        self.pems, self.problems = pems, problems
        return is_other


def _bundle(path: Path, now: datetime) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise ContractError(f"bundle {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BUNDLE_BYTES:
        raise ContractError(f"bundle {path} is longer than {MAX_BUNDLE_BYTES} bytes")
    advice = "; put there what `dlion trust show` says at that site"
    try:
        certificates = authorities_in(content)
    except ContractError as error:
        raise ContractError(f"bundle {path} {error}{advice}") from error
    ends = max(each.not_valid_after_utc for each in certificates)
    if now >= ends:
        raise ContractError(f"bundle {path} has run out on {ends:%Y-%m-%d}{advice}")
    return pem(*certificates)  # and nothing else that may stand in the file, a key least of all
