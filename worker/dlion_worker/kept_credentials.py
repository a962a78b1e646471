"""What a process of a worker keeps so that the next one is taken for it: key and certificate, so
that a trainer needs no coordinator, and the key by which a pod proves that a token is its own.

Owns these files. Key and certificate stand in the trainer's own folder, readable by its user alone;
a certificate is used while at least a third of its life is left, and to its end where nobody signs
a new one. The pod's key stands where both its containers read it. A damaged or foreign file counts
as missing. See docs/decisions/0004-kept-credentials.md and 0020-first-bearer.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
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
PROOF_KEY_FILE = "proof-key.pem"
"""The pod's, for nothing but to prove who shows its token; it stays the same."""
PROOF_COUNT_FILE = "proof-count-{}"
"""The highest count of its requests of that use: each has a higher one."""
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


def kept_proof_key(folder: Path | str) -> WorkerKey:
    """The pod's key that is kept there, or a new one, which is from now on; of two processes that
    come at once both get the same.

    Raises:
        OSError: it cannot be read or kept.
    """
    path = Path(folder) / PROOF_KEY_FILE
    try:
        return WorkerKey.from_pem(path.read_bytes())
    except FileNotFoundError:
        _LOG.info("a key is made by which this pod proves who it is")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        _LOG.error("%s is damaged: another key takes its place (%s)", path, error)
        path.unlink(missing_ok=True)
    mine = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        write_atomically(mine, WorkerKey().pem(), mode=0o640)  # the pod's other container, too
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink(missing_ok=True)
    return WorkerKey.from_pem(path.read_bytes())


def next_count(folder: Path | str, use: str, least: int) -> int:
    """A count above all that were kept there for that use, and at least so high. It is kept where
    that can be done: on a full disk a clock that goes on will do."""
    path = Path(folder) / PROOF_COUNT_FILE.format(use)
    try:
        kept = int(path.read_bytes()[:20])
    except (OSError, ValueError):
        kept = 0
    count = max(kept + 1, least)
    try:
        write_atomically(path, b"%d" % count, mode=0o640)
    except OSError as error:
        _LOG.warning("the count of proofs is not kept: %s", error)
    return count


def forget_credentials(state_dir: Path | str) -> None:
    """Removes them: the authority that signed them is gone, or the run is over."""
    (Path(state_dir) / CREDENTIALS_FILE).unlink(missing_ok=True)
