"""An operator's certificate, and verification of other operators'.

As between workers (docs/exchange.md), a client trusts only the called site's bundle and requires
its operator's name. A server trusts all bundles in the handshake, then verifies the certificate
again with the claimed site's bundle.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import grpc
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from dlion_api.errors import ContractError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_operator.pki.authority import CertificateAuthority

MAX_CERTIFICATE_BYTES = 16384


class Credentials:
    """This operator's certificate, renewed after half of its lifetime, and the trusted bundles."""

    def __init__(
        self, authority: CertificateAuthority, life: timedelta, *, now: datetime | None = None
    ) -> None:
        self._authority = authority
        self._life = life
        self._bundles: Mapping[SiteName, bytes] = {}
        self.version = 0
        """Increases with every change that takes effect at a new handshake."""
        self.handshakes = 0
        """Handshakes that callers began here; counted in a thread of gRPC."""
        self._served_version = -1
        self._make(now or datetime.now(UTC))

    def trust(self, bundles: Mapping[SiteName, bytes]) -> None:
        """Trust these sites by these bundles, and no others."""
        self._bundles = dict(bundles)
        self.version += 1

    def replace_authority(
        self, authority: CertificateAuthority, *, now: datetime | None = None
    ) -> None:
        """Use `authority` to sign this operator's certificates."""
        self._authority = authority
        self._make(now or datetime.now(UTC))

    def renew(self, *, now: datetime | None = None) -> None:
        """Make a new certificate if one is due."""
        now = now or datetime.now(UTC)
        if self._own.is_renewal_due(now):
            self._make(now)

    def server(self) -> grpc.ServerCredentials:
        """Return server credentials that require client certificates; updated at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._changed,  # type: ignore[arg-type]  # None: unchanged
            require_client_authentication=True,
        )

    def bundle(self, site: SiteName) -> bytes | None:
        """Return the bundle that the site is trusted by; None: it is not trusted."""
        return self._bundles.get(site)

    def channel(
        self, site: SiteName, address: str, options: Sequence[tuple[str, int]]
    ) -> grpc.aio.Channel:
        """Return a channel to that site's operator only, not up yet.

        Raises: ContractError if the site has no bundle.
        """
        bundle = self._bundles.get(site)
        if bundle is None:
            raise ContractError(f"no bundle of site {site}")
        own = self._own
        credentials = grpc.ssl_channel_credentials(bundle, own.key_pem, own.certificate_chain_pem)
        common = (
            ("grpc.enable_http_proxy", 0),
            # Without it, channels share a connection; each needs a handshake with these.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.ssl_target_name_override", OperatorIdentity(site).dns_name),
        )
        return grpc.aio.secure_channel(address, credentials, options=(*common, *options))

    def check(
        self, certificate_pem: bytes | None, site: SiteName, *, now: datetime | None = None
    ) -> None:
        """Verify that the certificate is valid and identifies that site's operator.

        Raises: ContractError if it does not, or there is none.
        """
        operator, bundle = OperatorIdentity(site), self._bundles.get(site)
        if bundle is None:
            raise ContractError(f"{operator.name}: no bundle of that site is known here")
        if not certificate_pem or len(certificate_pem) > MAX_CERTIFICATE_BYTES:
            raise ContractError(f"{operator.name}: no certificate of a usable size was shown")
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            store = Store(x509.load_pem_x509_certificates(bundle))
            policy = PolicyBuilder().store(store).time(now or datetime.now(UTC))
            subjects = policy.build_client_verifier().verify(certificate, []).subjects
        except Exception as error:  # of odd certificates it has no common class
            raise ContractError(
                f"certificate of a caller that claims to be {operator.name} is not by the"
                f" authority of site {site}, or not valid now: {error}"
            ) from error
        if x509.UniformResourceIdentifier(operator.spiffe_id) not in (subjects or []):
            given = ", ".join(str(name.value) for name in subjects or [])
            raise ContractError(
                f"a caller claims to be {operator.spiffe_id}, its certificate names"
                f" {given or 'nothing'}"
            )

    def operator_of(
        self, certificate_pem: bytes | None, *, now: datetime | None = None
    ) -> SiteName:
        """Return the site whose operator the certificate identifies, once verified.

        Raises: ContractError if it identifies no known operator, or there is none.
        """
        uris = _uris(certificate_pem)
        for site in self._bundles:
            if OperatorIdentity(site).spiffe_id in uris:
                self.check(certificate_pem, site, now=now)
                return site
        given = ", ".join(uris)[:200]
        raise ContractError(f"a caller whose certificate is of no operator: {given or 'no name'}")

    def _make(self, now: datetime) -> None:
        self._own = self._authority.operator_identity(life=self._life, now=now)
        self.version += 1

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self._served_version = self.version
        # gRPC needs at least one: this site's authority signs no other site's operator.
        trusted = self._bundles.values() or [self._authority.bundle_pem]
        return grpc.ssl_server_certificate_configuration(
            [(self._own.key_pem, self._own.certificate_chain_pem)],
            root_certificates=b"\n".join(trusted),
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        self.handshakes += 1
        return None if self._served_version == self.version else self._configuration()


def _uris(certificate_pem: bytes | None) -> list[str]:
    """Return the certificate's URIs, unverified. Raises: ContractError if there are none."""
    if not certificate_pem or len(certificate_pem) > MAX_CERTIFICATE_BYTES:
        raise ContractError("no certificate of a usable size was shown")
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception as error:  # of odd certificates it has no common class
        raise ContractError(f"a caller's certificate has no names: {error}") from error
    return names.get_values_for_type(x509.UniformResourceIdentifier)
