"""Identities of jobs, runs, sites and workers, and their forms on the wire."""

import re
from dataclasses import dataclass
from typing import NewType

Rank = NewType("Rank", int)
"""A worker's number in the job, counted from 0 over all sites."""

SiteName = NewType("SiteName", str)

GROUP = "dlion.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DLionJob"
RUNTIME_KIND = "DLionRuntime"

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""RFC 1123 label; use with `fullmatch`."""


@dataclass(frozen=True, order=True)
class JobKey:
    """A run of a job, equal at every site, unlike UIDs."""

    namespace: str
    name: str
    run_id: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}#{self.run_id}"


@dataclass(frozen=True, order=True)
class WorkerIdentity:
    """Identity of a worker, independent of its incarnation."""

    rank: Rank
    site: SiteName
    group: str
    index: int

    @property
    def name(self) -> str:
        """Short name for people.

        >>> WorkerIdentity(Rank(3), SiteName("plant-b"), "gpu", 0).name
        'plant-b/gpu-0'
        """
        return f"{self.site}/{self.group}-{self.index}"

    def spiffe_id(self, job: JobKey) -> str:
        """Return the URI subject alternative name of this worker's certificate."""
        return (
            f"spiffe://{self.site}/ns/{job.namespace}/job/{job.name}/run/{job.run_id}"
            f"/group/{self.group}/worker/{self.index}"
        )

    def dns_name(self, job: JobKey) -> str:
        """Return the DNS subject alternative name; gRPC clients cannot verify URIs.

        >>> worker = WorkerIdentity(Rank(3), SiteName("plant-b"), "gpu", 0)
        >>> worker.dns_name(JobKey("default", "cifar10", "1"))
        'w0.gpu.1.cifar10.default.plant-b.dlion'
        """
        return (
            f"w{self.index}.{self.group}.{job.run_id}.{job.name}.{job.namespace}.{self.site}.dlion"
        )

    def measuring_dns_name(self, job: JobKey) -> str:
        """Return the DNS name for the measuring port: a gateway routes to the two ports by name.

        >>> worker = WorkerIdentity(Rank(3), SiteName("plant-b"), "gpu", 0)
        >>> worker.measuring_dns_name(JobKey("default", "cifar10", "1"))
        'm0.gpu.1.cifar10.default.plant-b.dlion'
        """
        return f"m{self.dns_name(job)[1:]}"


@dataclass(frozen=True, order=True)
class KeeperIdentity:
    """Identity of a site's keeper."""

    site: SiteName

    @property
    def name(self) -> str:
        """Short name for people."""
        return f"{self.site}/keeper"

    def spiffe_id(self, job: JobKey) -> str:
        """Return the URI subject alternative name of the keeper's certificate."""
        return f"spiffe://{self.site}/ns/{job.namespace}/job/{job.name}/run/{job.run_id}/keeper"

    def dns_name(self, job: JobKey) -> str:
        """Return the DNS subject alternative name that workers verify.

        >>> KeeperIdentity(SiteName("plant-b")).dns_name(JobKey("default", "cifar10", "1"))
        'keeper.1.cifar10.default.plant-b.dlion'
        """
        return f"keeper.{job.run_id}.{job.name}.{job.namespace}.{self.site}.dlion"


@dataclass(frozen=True, order=True)
class OperatorIdentity:
    """Identity of a site's operator towards other sites' operators."""

    site: SiteName

    @property
    def name(self) -> str:
        """Short name for people."""
        return f"{self.site}/operator"

    @property
    def spiffe_id(self) -> str:
        """URI subject alternative name of the operator's certificate."""
        return f"spiffe://{self.site}/operator"

    @property
    def dns_name(self) -> str:
        """DNS subject alternative name that other sites' operators verify.

        >>> OperatorIdentity(SiteName("plant-b")).dns_name
        'operator.plant-b.dlion'
        """
        return f"operator.{self.site}.dlion"
