"""Build one file with everything for an installation without network (docs/installing.md).

    make bundle                            # dist/dlion-bundle-VERSION.tar
    make bundle BASE=docker.io/library/debian:bookworm-slim@sha256:...

`make bundle` runs it. Decisions and reasons: docs/decisions/0038-bundle.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tomllib
from pathlib import Path

from bundle.archives import sha256_of
from bundle.assembly import BundlePlan, build_bundle, progress, source_date_epoch_s
from bundle.errors import BundleError
from bundle.image_builders import (
    BUILDERS,
    PLATFORMS,
    ROOT,
    chosen_builder,
    own_platform,
    require_platform,
    testbed_base,
)

BASE = "docker.io/library/debian:bookworm-slim"
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")


def _plan(arguments: argparse.Namespace) -> BundlePlan:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    platform = arguments.platform or own_platform()
    if platform not in PLATFORMS:
        raise BundleError(f"PLATFORM={platform}: allowed are {', '.join(PLATFORMS)}")
    builder = chosen_builder(arguments.builder or "auto")
    if arguments.base and not _REFERENCE.fullmatch(arguments.base):
        raise BundleError(f"BASE={arguments.base!r} is not an image: NAME or NAME@sha256:DIGITS, "
                          "64 hexadecimal ones")  # fmt: skip
    if builder == "testbed" and arguments.base:
        raise BundleError("BUILDER=testbed has a base of its own: leave BASE out")
    require_platform(platform, builder)
    base = testbed_base(platform) if builder == "testbed" else arguments.base or BASE
    if "@sha256:" not in base:
        progress(
            f"note: the base {base} has no digest: the next build may get another content. "
            f"A release sets BASE={base}@sha256:..., which `crane digest {base}` prints"
        )
    return BundlePlan(version, platform, builder, base, source_date_epoch_s())


def main() -> int:
    """Build it and print its path. The exit code is 1 if it cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make bundle",
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--platform", help=f"{' or '.join(PLATFORMS)}; default: this machine's")
    parser.add_argument("--base", help=f"base image, best with its digest; default: {BASE}")
    parser.add_argument("--builder", help=f"{', '.join(BUILDERS)}; default: the first that works")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder; default: dist")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bundle = build_bundle(_plan(arguments), arguments.out.resolve())
    except (BundleError, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bundle: interrupted; nothing is left of it", file=sys.stderr)
        return 130
    size = bundle.stat().st_size / 1e6
    print(f"{bundle}  {size:.0f} MB  sha256 {sha256_of(bundle)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
