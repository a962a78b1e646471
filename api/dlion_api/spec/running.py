"""`spec.network`, `spec.tls`, `spec.checkpoint`: how a job lives on its sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dlion_api.document import Rule, setting
from dlion_api.spec.bounds import LABEL, LABEL_WORDS

_NAME = rf"{LABEL}(\.{LABEL})*"
_NAME_WORDS = f"{LABEL_WORDS}, parts joined by dots"


@dataclass(frozen=True, kw_only=True)
class Network:
    """How workers reach each other."""

    exposure: Literal["PodNetwork", "NodePort", "LoadBalancer", "Gateway"] = setting(
        "how a worker is reached from other sites: at its pod, where a network joins the clusters;"
        " at ports of its site's nodes; at a load balancer's; or by its name, through one port of"
        " its site.",
        default="PodNetwork",
    )
    link_shape: Literal["sharedUplink", "perPeer", "auto"] = setting(
        "whether a worker's links share one rate, have one each, or which of both is measured.",
        default="auto",
    )
    bandwidth_fraction: float = setting(
        "share of what a link carries that the exchange may use; the rest is left to others.",
        default=1.0,
        above=0,
        maximum=1,
    )
    max_message_bytes: int = setting(
        "a longer message from a peer is refused.",
        default=256 * 2**20,
        minimum=2**20,
        maximum=2**31 - 1,
        unit="bytes",
    )


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Where the workers' certificates come from."""

    mode: Literal["Managed", "Secret", "CertManager", "Disabled"] = setting(
        "the site's operator signs; or an authority in a Secret of the job's namespace does, at"
        " each site its own, or one that cert-manager makes there; or links are open to anybody.",
        default="Managed",
    )
    secret_name: str | None = setting(
        "Secret with the authority's certificate and key (tls.crt, tls.key), in mode Secret.",
        default=None,
        pattern=_NAME,
        pattern_words=_NAME_WORDS,
        max_length=253,
    )
    issuer_name: str | None = setting(
        "issuer that cert-manager has the authority's certificate from, in mode CertManager.",
        default=None,
        pattern=_NAME,
        pattern_words=_NAME_WORDS,
        max_length=253,
    )
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = setting(
        "kind of that issuer.", default="Issuer"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.mode == 'Secret') == has(self.secretName)",
            message="secretName is for mode Secret, and needed there",
            holds=lambda it: (it.mode == "Secret") == (it.secret_name is not None),
            reads=("secretName", "mode"),
        ),
        Rule(
            cel="(self.mode == 'CertManager') == has(self.issuerName)",
            message="issuerName is for mode CertManager, and needed there",
            holds=lambda it: (it.mode == "CertManager") == (it.issuer_name is not None),
            reads=("issuerName", "mode"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How often state is kept; where to is the site's business."""

    every_seconds: int = setting(
        "interval between checkpoints.",
        default=300,
        minimum=1,
        maximum=7 * 86400,
        unit="seconds",
        hashed=False,
    )
