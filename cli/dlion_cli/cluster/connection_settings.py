"""The user's choice of an API server, of the way to it and of the identity there."""

from dataclasses import dataclass, field


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
    """Longest silence in a response; 0: no limit. Streams that wait for news have none."""
    impersonated_user: str | None = None
    impersonated_groups: tuple[str, ...] = ()

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
