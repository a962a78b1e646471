"""Stores credentials on disk for the next process of the same worker.

Key and certificate, in the trainer's folder and readable by its user alone, let it restart without
the coordinator. The pod's proof key, which proves possession of its token, is shared by the pod's
containers. A damaged or foreign file counts as missing. See docs/decisions/0004-kept-credentials.md
and 0020-first-bearer.md.
"""

import contextlib
import json
import logging
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from dlion_api.atomic_file import write_atomically
from dlion_api.names import JobKey, Rank, SiteName
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE, proof_statement
from dlion_api.wire import coordination_pb2
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey

_LOG = logging.getLogger(__name__)

CREDENTIALS_FILE = "credentials.json"
PROOF_KEY_FILE = "proof-key.pem"
"""The pod's key, used only to prove possession of its token; it never changes."""
CHECKPOINT_KEY_FILE = "checkpoint-key-{}"
"""What authenticates that rank's checkpoints."""
PROOF_COUNT_FILE = "proof-count-{}"
"""The highest request count for that purpose; each request has a higher one."""
MIN_LIFE_LEFT = 1 / 3
"""With less than this part of its lifetime left, a new certificate is requested first."""


def store_credentials(state_dir: Path | str, job: JobKey, credentials: WorkerCredentials) -> None:
    """Write the credentials to disk, mode 0600. Raises `OSError`."""
    if credentials.key is None:
        return
    key_pem, chain_pem = credentials.key_and_chain()
    document = {
        "job": str(job),
        "key": key_pem.decode("ascii"),
        "chain": chain_pem.decode("ascii"),
        "sites": {site: pem.decode("ascii") for site, pem in credentials.site_bundles_pem.items()},
    }
    content = json.dumps(document, indent=1).encode()
    write_atomically(Path(state_dir) / CREDENTIALS_FILE, content, mode=0o600)


def load_credentials(
    state_dir: Path | str,
    job: JobKey,
    *,
    min_life_left: float = MIN_LIFE_LEFT,
    now: datetime | None = None,
) -> WorkerCredentials | None:
    """Load that job's credentials, if that fraction of the lifetime is left (0: any).

    A certificate that begins later counts as one without: its signer's clock was fast.
    """
    path = Path(state_dir) / CREDENTIALS_FILE
    try:
        document = json.loads(path.read_bytes())
        chain_pem = str(document["chain"]).encode("ascii")
        key = WorkerKey.from_pem(str(document["key"]).encode("ascii"))
        sites = {SiteName(str(s)): str(p).encode("ascii") for s, p in document["sites"].items()}
        certificate = x509.load_pem_x509_certificate(chain_pem)
        is_ours = document["job"] == str(job) and key.matches(certificate)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("%s is damaged: asking for a new certificate (%r)", path, error)
        return None
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    life, now = ends - begins - CLOCK_SKEW_ALLOWANCE, now or datetime.now(UTC)
    left = ends - now if begins <= now else timedelta(0)
    if not is_ours or left < life * min_life_left:
        return None
    return WorkerCredentials(key, chain_pem, sites)


def store_checkpoint_key(folder: Path, rank: Rank, key: bytes) -> None:
    """Write the key to the pod's own folder, mode 0600; nothing where it is empty. Raises: OSError.

    Not into the state folder, which has the checkpoint: who may write that could read the key.
    """
    if key:
        write_atomically(folder / CHECKPOINT_KEY_FILE.format(rank), key)


def load_checkpoint_key(folder: Path, rank: Rank) -> bytes:
    """Return the key of an earlier process; empty: the coordinator gave none. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / CHECKPOINT_KEY_FILE.format(rank)).read_bytes()
    return b""


def make_pod_proof(
    folder: Path, *, job: JobKey, use: str, csr_pem: bytes = b""
) -> coordination_pb2.PodProof:
    """Sign a request with the key that all processes of the pod share in that folder.

    It proves that the pod first used its token: a stolen token alone is not enough to request a
    certificate, join or follow (`dlion_operator.pki.token_bindings` is the other side). Raises:
    OSError (a new key cannot be saved).
    """
    key = load_or_create_proof_key(folder)
    # Nanoseconds since boot, but above the saved count: a sandbox may start at zero again.
    count = next_proof_count(folder, use, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    signature = key.sign(proof_statement(str(job), use, csr_pem, count))
    return coordination_pb2.PodProof(key_der=key.public_der(), count=count, signature=signature)


def load_or_create_proof_key(folder: Path | str) -> WorkerKey:
    """Load the pod's key, or create it. Concurrent processes get the same key.

    Raises: OSError (it cannot be read or stored).
    """
    path = Path(folder) / PROOF_KEY_FILE
    try:
        return WorkerKey.from_pem(path.read_bytes())
    except FileNotFoundError:
        _LOG.info("creating the key that proves this pod's identity")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        _LOG.error("%s is damaged: creating another key (%s)", path, error)
        path.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        write_atomically(temporary, WorkerKey().pem(), mode=0o640)  # the pod's other container, too
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return WorkerKey.from_pem(path.read_bytes())


def next_proof_count(folder: Path | str, use: str, minimum: int) -> int:
    """Return a count above all stored ones for that use, and at least `minimum`.

    A failure to store it is tolerated: on a full disk, the caller's clock still increases.
    """
    path = Path(folder) / PROOF_COUNT_FILE.format(use)
    try:
        highest = int(path.read_bytes()[:20])
    except (OSError, ValueError):
        highest = 0
    count = max(highest + 1, minimum)
    try:
        write_atomically(path, b"%d" % count, mode=0o640)
    except OSError as error:
        _LOG.warning("the proof count is not stored: %s", error)
    return count


def delete_credentials(state_dir: Path | str) -> None:
    """Delete the credentials: their authority is gone, or the run is over."""
    (Path(state_dir) / CREDENTIALS_FILE).unlink(missing_ok=True)
