"""Tests of credentials for downloads.

The token, or the user and password, of a Secret become a header. A Secret without them fails the
download before a request, because they may be added later. No message contains a token. Outside a
cluster each Secret has its own variables. Credentials are sent over https only, and not to another
server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlion_api.cluster_names import DOWNLOAD_CREDENTIALS
from dlion_api.errors import DataError, UnavailableError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.credentials import authorization, local_variables
from dlion_worker.initializers.http_file import HttpFile
from dlion_worker.initializers.store import DownloadStore
from file_server import ServedFile, served, write_certificate

CONTENT = b"content"


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedFile]:
    """A file over https with a trusted certificate."""
    certificate = write_certificate(tmp_path / "server.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with served(CONTENT, certificate=certificate) as file:
        yield file


def download(url: str = "https://example.com/data.npz", secret_name: str = "hub") -> Download:
    return Download(url=url, sha256=hashlib.sha256(CONTENT).hexdigest(), secret_name=secret_name)


@pytest.mark.parametrize(
    ("given", "header"),
    [({"token": "a\n"}, "Bearer a"), ({"token": "a", "username": "b"}, "Bearer a"),
     ({"username": "user", "password": "pass"}, "Basic dXNlcjpwYXNz"),
     ({"username": "user\n", "password": "pass\r\n"}, "Basic dXNlcjpwYXNz"),
     ({"username": "\udcff"}, "Basic /zo=")],
)  # fmt: skip
def test_credentials_become_a_header(given: dict[str, str], header: str) -> None:
    environment = {DOWNLOAD_CREDENTIALS[key]: value for key, value in given.items()}
    assert authorization(download(), environment, DOWNLOAD_CREDENTIALS) == header
    assert authorization(download(secret_name=""), environment, DOWNLOAD_CREDENTIALS) == ""


@pytest.mark.parametrize("token", ["abc\nSECRET", "abc SECRET", "SECRET\x7f", "SECRET\u00e9"])
def test_a_token_that_no_header_can_have_is_refused_and_not_shown(token: str) -> None:
    variables = local_variables("hub")
    with pytest.raises(DataError, match="Secret hub: token must be one line") as caught:
        authorization(download(), {variables["token"]: token}, variables)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("token", [None, "", " \n"])
def test_a_secret_without_credentials_fails_before_a_request(
    tmp_path: Path, secure: ServedFile, token: str | None
) -> None:
    environment = {} if token is None else {local_variables("hub")["token"]: token}
    with pytest.raises(UnavailableError, match=r"no credentials of Secret hub.*token, or username"):
        DownloadStore(tmp_path / "d").fetch(download(secure.url), environment=environment)
    assert not secure.requests


def test_each_secret_has_its_own_variables(tmp_path: Path, secure: ServedFile) -> None:
    environment = {"DLION_DOWNLOAD_TOKEN": "pod", "DLION_DOWNLOAD_TOKEN_HUB": "one",
                   "DLION_DOWNLOAD_TOKEN_LAB_A_B": "two"}  # fmt: skip
    for name in ("hub", "lab.a-b"):
        DownloadStore(tmp_path / name).fetch(download(secure.url, name), environment=environment)
    sent = [each["Authorization"] for each in secure.requests]
    assert sent == ["Bearer one", "Bearer two"]


def test_a_redirect_to_plain_http_is_refused(tmp_path: Path, secure: ServedFile) -> None:
    with served(CONTENT) as plain:
        secure.failures, secure.redirect_to = ["redirect"], plain.url
        with pytest.raises(DataError, match="redirects to plain http"):
            HttpFile(secure.url).save(tmp_path / "part", max_bytes=100, on_progress=lambda *_: None)
    assert not plain.requests


def test_a_redirect_from_plain_http_is_followed(tmp_path: Path, secure: ServedFile) -> None:
    with served(CONTENT) as plain:
        plain.failures, plain.redirect_to = ["redirect"], secure.url
        HttpFile(plain.url).save(tmp_path / "part", max_bytes=100, on_progress=lambda *_: None)
    assert (tmp_path / "part").read_bytes() == CONTENT
