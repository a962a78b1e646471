"""Uploads the end of the trainer's output to the keeper, so that it outlives the pod.

The sidecar does so, because it outlives the trainer's container: the last words of a crashed
trainer are uploaded, too. What the keeper has of an earlier pod of this worker stays before them.
"""

import logging
import threading
import time
from pathlib import Path

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_worker.artifact_client.client import ArtifactClient
from dlion_worker.artifact_client.paths import log_path
from dlion_worker.rotated_log import last_lines, read_bounded, read_end

_LOG = logging.getLogger(__name__)

INTERVAL_S = 30.0
"""A pod that is lost with its node loses this much of its log."""
RETRY_S = 1.0
END_S = 5.0
"""How long a sidecar that ends waits for the keeper."""
NEXT_POD = b"---- the next pod of this worker ----\n"


class LogUpload:
    """One worker's uploads, in a thread from the start until `close`."""

    def __init__(
        self, keeper: ArtifactClient, rank: Rank, output: Path, *, interval_s: float = INTERVAL_S
    ) -> None:
        """`output` is the path of the trainer's log. This object closes the client."""
        self._keeper, self._path, self._output = keeper, log_path(rank), output
        self._interval_s = interval_s
        self._ending = threading.Event()
        self._uploaded = b""
        self._is_refused = False
        """Repeated, an upload would be refused again."""
        self._last_message = ""
        self._thread = threading.Thread(target=self._run, name="log upload", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Upload the rest; give up after `END_S`. Blocks."""
        self._ending.set()
        self._thread.join(END_S)
        self._keeper.close()  # cancels a call
        self._thread.join(RETRY_S)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._attempt()
        give_up_s = time.monotonic() + END_S - RETRY_S
        while not self._attempt() and time.monotonic() < give_up_s:
            time.sleep(RETRY_S)

    def _attempt(self) -> bool:
        """Upload what is new. Return whether nothing is left to do."""
        if self._is_refused:
            return True
        try:
            self._upload()
        except (UnavailableError, OSError) as error:
            self._warn(f"the log is not uploaded yet: {error}")
            return False
        except ContractError as error:
            self._is_refused = True
            self._warn(f"the log is not uploaded: {error}")
        return True

    def _upload(self) -> None:
        """Raises: as `ArtifactClient.put`."""
        own = read_end(self._output)
        if not own:
            return
        earlier = self._earlier()
        log = last_lines(earlier + NEXT_POD + own if earlier else own)
        if log == self._uploaded:
            return
        made = self._output.with_name("upload.log")
        write_atomically(made, log)
        self._keeper.put(self._path, made)
        self._uploaded = log

    def _earlier(self) -> bytes:
        """The log of this worker's earlier pods, downloaded once in the life of this pod."""
        path = self._output.with_name("earlier.log")
        if not path.exists() and not self._keeper.get(self._path, path):
            path.touch()
        return read_bounded(path)

    def _warn(self, message: str) -> None:
        if message != self._last_message:
            _LOG.warning("%s", message)
            self._last_message = message
