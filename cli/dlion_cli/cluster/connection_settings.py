"""The user's choice of an API server, of the way to it and of the identity there.

The command line (`connection_flags`) and `dlion.Client` make it, with the same checks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

MAX_TIMEOUT_S: Final = 24 * 3600.0


@dataclass(frozen=True)
class ConnectionSettings:
    """kubectl's options of a connection; what is not given comes from the kubeconfig."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    cluster: str | None = None
    user: str | None = None
    server: str | None = None
    """URL of the API server, instead of the cluster's."""
    token: str | None = field(default=None, repr=False)
    """Instead of all credentials of the user. Never print it."""
    certificate_authority: str | None = None
    """A PEM file, instead of the cluster's."""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    request_timeout_s: float | None = None
    """Maximum silence in a response; 0: no limit. Streams that wait for news have none."""
    impersonated_user: str | None = None
    impersonated_groups: tuple[str, ...] = ()

    def check(self, written: Callable[[str], str] = str) -> None:
        """Raises: ValueError for settings that contradict each other. `written`: how the user
        writes the name of one."""
        if self.impersonated_groups and not self.impersonated_user:
            groups, user = written("impersonated_groups"), written("impersonated_user")
            raise ValueError(f"{groups} needs {user} with the name of a user")
        if self.insecure_skip_tls_verify and self.certificate_authority:
            authority, skip = map(written, ("certificate_authority", "insecure_skip_tls_verify"))
            raise ValueError(f"{authority} and {skip} exclude each other")

    @property
    def names_entry(self) -> bool:
        """Whether it names an entry of a kubeconfig."""
        return any((self.context, self.cluster, self.user))

    @property
    def changes_server(self) -> bool:
        """Whether the API server or its verification differs from the kubeconfig's."""
        given = (self.server, self.certificate_authority, self.tls_server_name)
        return any(given) or self.insecure_skip_tls_verify

    @property
    def impersonation(self) -> list[tuple[str, str]]:
        """Headers that ask the API server to act as another user.

        They replace all of the kubeconfig's: groups of another user would give this one its rights.
        """
        if not self.impersonated_user:
            return []
        groups = [("Impersonate-Group", group) for group in self.impersonated_groups]
        return [("Impersonate-User", self.impersonated_user), *groups]


def server_url(text: str) -> str:
    """The URL of an API server, its scheme in small letters, without a slash at its end.

    Raises: ValueError, whose message has no password.
    """
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ValueError("the URL is invalid: write https://HOST:PORT") from None
    if url.username or url.password:
        raise ValueError("the URL contains credentials: remove them, and give a token")
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        shown = "this value" if re.search("[@?#]", text) else repr(text)  # no password
        raise ValueError(f"{shown} is not a URL of a server: write https://HOST:PORT")
    if url.query or url.fragment or not (text.isascii() and text.isprintable()):
        raise ValueError("the URL has more than a server and a path in ASCII")
    return url.geturl().rstrip("/")  # the client would use no authority for HTTPS://


def header_value(text: str) -> str:
    """The text, which fits a header. Raises: ValueError, without the text: it may be a token."""
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError(
            "the value is empty, or has a space or line break at an end or a character that is "
            "not ASCII"
        )
    return text
