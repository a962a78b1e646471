"""`spec.network`, `spec.tls`, `spec.checkpoint`: networking, certificates and checkpoints."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dlion_api.bounds import OBJECT_NAME_FORM
from dlion_api.document import Rule, optional, setting


@dataclass(frozen=True, kw_only=True)
class Network:
    """How workers reach each other."""

    exposure: Literal["PodNetwork", "NodePort", "LoadBalancer", "Gateway"] = setting(
        "how other sites reach a worker: at its pod; at ports of nodes; at a load balancer; or by"
        " server name, through one port of its site.",
        default="PodNetwork",
    )
    link_shape: Literal["sharedUplink", "perPeer", "auto"] = setting(
        "whether a worker's links share an uplink or have one rate each; auto measures it.",
        default="auto",
    )
    bandwidth_fraction: float = setting(
        "share of a link's bandwidth for the exchange (default ours).",
        default=0.3,
        above=0,
        maximum=1,
    )
    max_message_bytes: int = setting(
        "longer messages from a peer are refused.",
        default=256 * 2**20,
        minimum=2**20,
        maximum=2**31 - 1,
        unit="bytes",
    )


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Where the workers' certificates come from."""

    mode: Literal["Managed", "Secret", "CertManager", "Disabled"] = setting(
        "who signs at each site: the operator; an authority in a Secret of the job's namespace;"
        " or one that cert-manager creates. Disabled: no TLS, links are open to anyone.",
        default="Managed",
    )
    secret_name: str | None = optional(
        "Secret with tls.crt and tls.key, in mode Secret.",
        **OBJECT_NAME_FORM,
    )
    issuer_name: str | None = optional(
        "issuer of the authority's certificate, in mode CertManager.",
        **OBJECT_NAME_FORM,
    )
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = setting(
        "kind of that issuer.", default="Issuer"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.mode == 'Secret') == has(self.secretName)",
            message="secretName is required in mode Secret, and not allowed in others",
            holds=lambda it: (it.mode == "Secret") == (it.secret_name is not None),
            reads=("secretName", "mode"),
        ),
        Rule(
            cel="(self.mode == 'CertManager') == has(self.issuerName)",
            message="issuerName is required in mode CertManager, and not allowed in others",
            holds=lambda it: (it.mode == "CertManager") == (it.issuer_name is not None),
            reads=("issuerName", "mode"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How often state is saved; each site configures where."""

    every_seconds: int = setting(
        "interval between checkpoints.",
        default=300,
        minimum=1,
        maximum=7 * 86400,
        unit="seconds",
        hashed=False,
    )
