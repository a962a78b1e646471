"""A substitute for docker.io/library/debian:bookworm-slim, for machines without a registry.

It is debootstrap's smallest system, without the files that Debian leaves out of the slim image. It
adds what a build on this machine needs to reach Debian's archive and the Python package index:
package sources, certificates, and pip's settings. Only the substitute has them; the project's
Dockerfile does not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import UnavailableError
from testbed.binaries import cache_folder
from testbed.buildah import buildah, digest_of, has_image

_SUITE = "bookworm"
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
_LEFT_OUT = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man",
             "var/cache/apt", "var/lib/apt/lists", "var/log")  # fmt: skip
_DPKG = "".join(f"path-exclude /{folder}/*\n" for folder in _LEFT_OUT[:4])
_APT = 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n'
_INDEX_SETTINGS = ("index-url", "extra-index-url", "trusted-host")


@dataclass(frozen=True)
class MachineSettings:
    """The settings of this machine that go into the substitute."""

    sources: tuple[str, ...]
    """Lines of apt's sources.list."""
    certificates: bytes
    pip: tuple[tuple[str, str], ...]

    @property
    def mirror(self) -> str:
        """The mirror of Debian's packages."""
        return self.sources[0].split()[1]

    @property
    def key(self) -> str:
        """A hash of these settings and of the code that applies them."""
        settings = repr((self.sources, self.pip, Path(__file__).read_bytes())).encode()
        return hashlib.sha256(settings + self.certificates).hexdigest()[:12]


def make_base_image(architecture: str = "") -> str:
    """Build it, unless it exists with this machine's settings; return its name and digest.

    `architecture` is Debian's name of one that this machine emulates; empty for its own. Raises:
    UnavailableError.
    """
    settings = machine_settings()
    own = _run("dpkg", "--print-architecture").strip()
    name = architecture or own
    suffix = "" if name == own else f"-{name}"
    reference = f"localhost/testbed-base{suffix}:{settings.key}"
    if not has_image(reference):
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="base-") as made:
            folder = Path(made)
            _debootstrap(folder / "root", settings, name)
            _add_settings(folder / "root", settings)
            _run("tar", "--create", f"--file={folder}/root.tar", f"--directory={folder}/root", ".")
            (folder / "Dockerfile").write_text('FROM scratch\nADD root.tar /\nCMD ["bash"]\n')
            buildah("bud", f"--platform=linux/{name}", f"--tag={reference}", str(folder))
    return f"{reference}@{digest_of(reference)}"


def machine_settings() -> MachineSettings:
    """Read the settings from apt, pip and the environment. Raises: UnavailableError without apt."""
    if shutil.which("apt-get") is None:
        raise UnavailableError("no apt-get: the base image needs Debian or a derivative")
    form = "deb $(SITE) $(CODENAME) $(COMPONENT)"
    listed = _run("apt-get", "indextargets", "--format", form, "Created-By: Packages")
    sources = sorted({line for line in listed.splitlines() if f" {_SUITE}" in line})
    # The suite itself first: debootstrap's mirror.
    sources.sort(key=lambda line: line.split()[2] != _SUITE)
    if not sources or sources[0].split()[2] != _SUITE:
        raise UnavailableError(f"apt has no source of Debian {_SUITE}: {sources}")
    bundle = Path(os.environ.get("SSL_CERT_FILE") or f"/{_CERTIFICATES}")
    certificates = bundle.read_bytes() if bundle.exists() else b""
    return MachineSettings(tuple(sources), certificates, tuple(_pip_settings()))


def _pip_settings() -> list[tuple[str, str]]:
    """Names and values; the environment has precedence, as in pip."""
    found = {}
    for name in _INDEX_SETTINGS:
        configured = subprocess.run(
            ["python3", "-m", "pip", "config", "get", f"global.{name}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or configured.stdout.strip()
        if value:
            found[name] = value
    return sorted(found.items())


def _debootstrap(root: Path, settings: MachineSettings, architecture: str) -> None:
    # In a separate mount namespace, so that mounts below `root` end with it.
    _run(
        "unshare", "--mount", "--propagation=private",
        "debootstrap", f"--arch={architecture}", "--variant=minbase", _SUITE, str(root),
        settings.mirror,
    )  # fmt: skip
    for name in _LEFT_OUT:
        for path in (root / name).iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _add_settings(root: Path, settings: MachineSettings) -> None:
    texts = {
        "etc/apt/sources.list": "\n".join(settings.sources) + "\n",
        "etc/apt/apt.conf.d/90slim": _APT,
        "etc/dpkg/dpkg.cfg.d/slim": _DPKG,
        "etc/pip.conf": "[global]\n"
        + f"cert = /{_CERTIFICATES}\n" * bool(settings.certificates)
        + "".join(f"{name} = {value}\n" for name, value in settings.pip),
        "etc/uv/uv.toml": _uv_settings(dict(settings.pip)),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if settings.certificates:
        (root / _CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
        (root / _CERTIFICATES).write_bytes(settings.certificates)
        # Installing ca-certificates rewrites its bundle, which must include these.
        own = root / "usr/local/share/ca-certificates"
        own.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(_single(settings.certificates)):
            (own / f"machine-{number}.crt").write_text(one)


def _single(bundle: bytes) -> list[str]:
    begin, end = "-----BEGIN", "-----END CERTIFICATE-----\n"
    parts = bundle.decode(errors="replace").split(end)
    return [part[part.index(begin) :] + end for part in parts if begin in part]


def _uv_settings(pip: dict[str, str]) -> str:
    lines = ["system-certs = true"]
    if "index-url" in pip:
        lines.append(f'index-url = "{pip["index-url"]}"')
    if "extra-index-url" in pip:
        lines.append(f"extra-index-url = {pip['extra-index-url'].split()!r}")
    return "\n".join(lines) + "\n"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise UnavailableError(f"{command[0]} failed ({done.returncode}):\n{output}")
    return done.stdout
