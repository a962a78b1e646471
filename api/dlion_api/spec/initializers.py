"""`spec.trainer.initializer`: files that are downloaded before a worker trains."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, Final
from urllib.parse import unquote

from dlion_api.bounds import OPTIONAL_OBJECT_NAME_FORM
from dlion_api.document import Rule, optional, setting

URL_LENGTH: Final = 2048
_SEGMENT: Final = r'[!-"$-.0->@-~]'
"""A visible ASCII character without `/`, `?` and `#`."""
_HOST: Final = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
_USER: Final = r"https?://[^/]*@.*"
_BUCKET: Final = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_HTTP: Final = rf'https?://({_SEGMENT}*@)?{_HOST}/({_SEGMENT}*/)*{_SEGMENT}+(\?[!-"$-~]*)?'
_S3: Final = rf"s3://{_BUCKET}/({_SEGMENT}+/)*{_SEGMENT}+"
_S3_SCHEME: Final = "s3://"
ARCHIVE_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file, or an archive that is unpacked; its SHA-256 identifies it at any address."""

    url: str = setting(
        "address of the file; .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz and .zip are unpacked.",
        pattern=f"{_HTTP}|{_S3}",
        pattern_description="http:// or https://, a host, and a path that ends in a file's name; or"
        " s3://, a bucket, and such a path",
        max_length=URL_LENGTH,
        hashed=False,
    )
    sha256: str = setting(
        "SHA-256 of the file.",
        pattern="[0-9a-f]{64}",
        pattern_description="64 hexadecimal digits, in lower case",
        max_length=64,
    )
    secret_name: str = setting(
        "Secret in the job's namespace with token, or username and password, or for s3://"
        " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. dlion run takes them from the environment"
        " (docs/data.md).",
        default="",
        **OPTIONAL_OBJECT_NAME_FORM,
        hashed=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!self.url.matches('^{_USER}$')",
            message="a URL must not have a user or a password: anyone who reads the job would",
            holds=lambda it: re.fullmatch(_USER, it.url) is None,
            reads=("url",),
            advice="Put them into a Secret, and name it in secretName.",
        ),
        Rule(
            cel="self.secretName == '' || !self.url.startsWith('http://')",
            message="credentials need https",
            holds=lambda it: not it.secret_name or not it.url.startswith("http://"),
            reads=("secretName", "url"),
            advice="Use an https:// address, or leave secretName out.",
        ),
        Rule(
            cel=f"self.secretName != '' || !self.url.startsWith('{_S3_SCHEME}')",
            message="an s3:// address needs secretName",
            holds=lambda it: it.secret_name != "" or not it.url.startswith(_S3_SCHEME),
            reads=("secretName", "url"),
            advice="Name a Secret that has the keys, or use the https:// address of a public"
            " object.",
        ),
    )

    @property
    def file_name(self) -> str:
        """The last part of the URL's path; other characters than letters, digits, dots, dashes and
        underscores become underscores.

        >>> Download(url="https://example.com/a/my%20data.npz?v=1", sha256="0" * 64).file_name
        'my_data.npz'
        """
        name = PurePosixPath(unquote(self.url.partition("?")[0])).name
        return re.sub(r"[^-.A-Za-z0-9_]", "_", name)[-128:].lstrip(".") or "download"

    @property
    def folder_name(self) -> str:
        """Name of the folder that holds it: other names of the same file have other folders."""
        return f"{self.sha256}-{self.file_name}"

    @property
    def is_s3(self) -> bool:
        return self.url.startswith(_S3_SCHEME)

    @property
    def is_archive(self) -> bool:
        return self.file_name.endswith(ARCHIVE_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Initializer:
    """What is downloaded before training: in a pod by an init container."""

    dataset: Download | None = optional(
        "the samples: dataset.path and evaluationPath are relative to them."
    )
    model: Download | None = optional(
        "a model: startFrom or encoder is relative to it.",
    )
