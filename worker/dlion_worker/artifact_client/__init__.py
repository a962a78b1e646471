"""The worker's client for its site's keeper, and the file protocol of both sides.

`paths` defines the files and their owners, `chunks` the checksummed transfer. `client` makes the
calls, `upload_queue` makes them in a thread.
"""

from dlion_worker.artifact_client.client import ArtifactClient
from dlion_worker.artifact_client.upload_queue import UploadQueue

__all__ = ["ArtifactClient", "UploadQueue"]
