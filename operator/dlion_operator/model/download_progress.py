"""The download progress of an init container, as reported to the coordinator."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DownloadProgress:
    container: str
    """Name of the init container."""
    done_bytes: int
    total_bytes: int
    """0: unknown."""
    pod_uid: str = ""
    """UID of the pod that reported it: a worker's next pod downloads again. Empty: of no pod."""

    def __str__(self) -> str:
        """Return the progress as text for users.

        >>> str(DownloadProgress("dataset-initializer", 1_400_000_000, 3_200_000_000))
        '44% of 3.2 GB'
        >>> str(DownloadProgress("dataset-initializer", 1_400_000, 0))
        '1.4 MB'
        """
        if not self.total_bytes:
            return _size(self.done_bytes)
        share = min(1.0, self.done_bytes / self.total_bytes)
        return f"{share:.0%} of {_size(self.total_bytes)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
