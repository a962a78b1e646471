"""Test downloads from a real S3 server that checks signatures.

An object is downloaded with and without TLS, also by the init container, and resumes where it
stopped. A wrong key, bucket, object, region, port or scheme ends the download at once with what to
do. No message contains a key.

Left out: tests that need no server (tests/unit/worker/initializers/test_s3_object.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlion_api.cluster_names import DOWNLOAD_CREDENTIALS
from dlion_api.errors import DataError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.store import DownloadStore
from file_server import write_certificate
from s3_gateway import S3Server, built, serving

pytestmark = pytest.mark.patient

CONTENT = bytes(range(256)) * 4096
KEY = "sets/cracks & more.npz"
URL = "s3://data-sets/sets/cracks%20%26%20more.npz"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from served(tmp_path_factory.mktemp("s3"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Path]]:
    folder = tmp_path_factory.mktemp("s3")
    certificate = write_certificate(folder / "server.pem")
    for server in served(folder, certificate):
        yield server, certificate


def served(folder: Path, certificate: Path | None = None) -> Iterator[S3Server]:
    if built() is None:
        if os.environ.get("DLION_REQUIRE_TESTBED"):
            pytest.fail("no S3 server: run tools/testbed build")
        pytest.skip("no S3 server: run tools/testbed build")
    with serving(folder / "server", certificate) as server:
        server.put("data-sets", KEY, CONTENT)
        yield server


def fetch(server: S3Server, folder: Path, url: str = URL, **secret: str) -> Path:
    """Download with that Secret, changed by `secret`."""
    download = Download(url=url, sha256=hashlib.sha256(CONTENT).hexdigest(), secret_name="keys")
    given = {
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        "AWS_ENDPOINT_URL": server.url,
        **secret,
    }
    environment = {DOWNLOAD_CREDENTIALS[key]: value for key, value in given.items()}
    return DownloadStore(folder).fetch(
        download, environment=environment, variables=DOWNLOAD_CREDENTIALS
    )


def test_an_object_is_downloaded(tmp_path: Path, server: S3Server) -> None:
    place = fetch(server, tmp_path)
    assert (place / "cracks___more.npz").read_bytes() == CONTENT


def test_a_download_resumes_where_it_stopped(tmp_path: Path, server: S3Server) -> None:
    part = tmp_path / f".{hashlib.sha256(CONTENT).hexdigest()}.part"
    part.write_bytes(CONTENT[:-1000])
    inode = part.stat().st_ino
    place = fetch(server, tmp_path)
    (file,) = place.iterdir()
    assert file.read_bytes() == CONTENT
    assert file.stat().st_ino == inode


def test_an_object_is_downloaded_over_tls(
    tmp_path: Path, secure: tuple[S3Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificate = secure
    with pytest.raises(DataError, match=f"{server.url}: its certificate is not trusted"):
        fetch(server, tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert fetch(server, tmp_path).is_dir()


@pytest.mark.parametrize(
    ("url", "secret", "words"),
    [
        (URL, {"AWS_SECRET_ACCESS_KEY": "WRONG"}, "SignatureDoesNotMatch. Correct AWS_ACC"),
        (URL, {"AWS_ACCESS_KEY_ID": "WRONG"}, "Correct the address or the keys"),
        (URL, {"AWS_REGION": "eu-west-1"}, "AWS_REGION"),
        ("s3://data-sets/none.npz", {}, "HTTP 404 Not Found: NoSuchKey. Correct the key"),
        ("s3://none/a.npz", {}, "HTTP 404 Not Found: NoSuchBucket. Correct the bucket"),
    ],
)
def test_a_refusal_states_what_to_do(
    tmp_path: Path, server: S3Server, url: str, secret: dict[str, str], words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        fetch(server, tmp_path, url, **secret)
    message = str(caught.value)
    assert message.startswith(f"{url} at {server.url}: HTTP 40")
    assert not [each for each in (server.secret_access_key, "WRONG", "X-Amz") if each in message]


def test_a_server_without_tls_is_reported(tmp_path: Path, server: S3Server) -> None:
    endpoint = server.url.replace("http://", "https://")
    with pytest.raises(DataError, match="the server has no TLS at this port"):
        fetch(server, tmp_path, AWS_ENDPOINT_URL=endpoint)
