"""Test downloads as part of a job.

A download from another address or with another Secret is the same job; one with another digest is
another job. Its name in the folder is plain. Only archives are unpacked, recognised by their names.
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.spec import load_job
from dlion_api.spec.initializers import Download
from manifest_table import DATASET, DOWNLOAD, INITIALIZER, PATH_DATA, changed, smallest


def job_hash(**download: Any) -> str:
    given = {DATASET: PATH_DATA, f"{INITIALIZER}.dataset": {**DOWNLOAD, **download}}
    return load_job(changed(smallest(), given)).hash()


def test_only_the_digest_makes_another_job() -> None:
    assert job_hash(url="https://mirror.example/other.zip", secretName="hub") == job_hash()
    assert job_hash(sha256="f" * 64) != job_hash()


@pytest.mark.parametrize(
    ("path", "name", "is_archive"),
    [
        ("a/data.npz", "data.npz", False),
        ("a/data.tar.gz?token=x/y.npz", "data.tar.gz", True),
        ("data.zip.keras", "data.zip.keras", False),
        ("a/%2e%2e", "download", False),
        ("a%2Fb%2Fmy%20data.tgz", "my_data.tgz", True),
        ("a/..", "download", False),
        ("a/.hidden", "hidden", False),
        ("a/%00%0A", "__", False),
        ("a/" + "n" * 9 + "." * 20 + "b" * 120, "b" * 120, False),
        ("a/" + "n" * 500 + ".zip", "n" * 124 + ".zip", True),
    ],
)
def test_the_name_is_plain(path: str, name: str, is_archive: bool) -> None:
    download = Download(url=f"https://example.com/{path}", sha256="0" * 64)
    assert (download.file_name, download.is_archive) == (name, is_archive)
