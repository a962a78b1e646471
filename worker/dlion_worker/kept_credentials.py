"""What a process of a worker keeps so that the next one is taken for it: key and certificate, so
that a trainer needs no coordinator, and the keys by which each role proves that it asks for one.

Owns these files in the worker's state folder, readable by its user alone. A certificate is used
while at least a third of its life is left, and to its end where nobody signs a new one; a damaged
or foreign file counts as missing. See docs/decisions/0004-kept-credentials.md and
0020-first-bearer.md.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from dlion_api.atomic_file import write_atomically
from dlion_api.names import JobKey, SiteName
from dlion_api.trust import BACKDATED
from dlion_worker.credentials import WorkerCredentials, WorkerKey

_LOG = logging.getLogger(__name__)

CREDENTIALS_FILE = "credentials.json"
PROOF_KEY_FILE = "proof-key-{}.pem"
"""Of each role. It is for nothing but requests for certificates, and stays the same."""
LEAST_LIFE_LEFT = 1 / 3
"""With less left, a new certificate is asked for first: they are renewed long before."""


def keep_credentials(state_dir: Path | str, job: JobKey, credentials: WorkerCredentials) -> None:
    """Puts them on disk, mode 0600. Raises `OSError` where that cannot be done."""
    if credentials.key is None:
        return
    key_pem, chain_pem = credentials.shown()
    document = {
        "job": str(job),
        "key": key_pem.decode("ascii"),
        "chain": chain_pem.decode("ascii"),
        "sites": {site: pem.decode("ascii") for site, pem in credentials.site_bundles_pem.items()},
    }
    content = json.dumps(document, indent=1).encode()
    write_atomically(Path(state_dir) / CREDENTIALS_FILE, content, mode=0o600)


def keep_changed(state_dir: Path | str, job: JobKey, credentials: WorkerCredentials) -> None:
    """Keeps them as they are now, renewed or with other authorities; the old ones stand where that
    fails."""
    try:
        keep_credentials(state_dir, job, credentials)
    except OSError as error:
        _LOG.warning("new certificate or bundles are not kept on disk: %s", error)


def kept_credentials(
    state_dir: Path | str,
    job: JobKey,
    *,
    least_life_left: float = LEAST_LIFE_LEFT,
    now: datetime | None = None,
) -> WorkerCredentials | None:
    """Those kept of that run, where so much of the certificate's life is left (0: any)."""
    path = Path(state_dir) / CREDENTIALS_FILE
    try:
        document = json.loads(path.read_bytes())
        chain_pem = str(document["chain"]).encode("ascii")
        key = WorkerKey.from_pem(str(document["key"]).encode("ascii"))
        sites = {SiteName(str(s)): str(p).encode("ascii") for s, p in document["sites"].items()}
        certificate = x509.load_pem_x509_certificate(chain_pem)
        is_ours = document["job"] == str(job) and key.fits(certificate)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("%s is damaged: asking for a new certificate (%r)", path, error)
        return None
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc - BACKDATED
    left = certificate.not_valid_after_utc - (now or datetime.now(UTC))
    if not is_ours or left < life * least_life_left:
        return None
    return WorkerCredentials(key, chain_pem, sites)


def kept_proof_key(folder: Path | str, role: str) -> WorkerKey:
    """The key of that role that is kept there, or a new one, which is from now on.

    Raises:
        OSError: it cannot be kept.
    """
    path = Path(folder) / PROOF_KEY_FILE.format(role)
    try:
        return WorkerKey.from_pem(path.read_bytes())
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        _LOG.warning("%s is damaged: a new key takes its place (%s)", path, error)
    key = WorkerKey()
    write_atomically(path, key.pem(), mode=0o600)
    return key


def forget_credentials(state_dir: Path | str) -> None:
    """Removes them: the authority that signed them is gone, or the run is over."""
    (Path(state_dir) / CREDENTIALS_FILE).unlink(missing_ok=True)
    for path in Path(state_dir).glob(PROOF_KEY_FILE.format("*")):
        path.unlink(missing_ok=True)
