"""Take the pictures of the report page for the documentation, with Chromium.

    python tools/report_screenshots.py REPORT.html [--out docs/images]

Writes report-desktop.png (1280 pixels wide) and report-phone.png (390), the upper part of the page
in light mode, each below 150 kB. Without Chromium it prints that and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from headless_browser import browser_page, chromium

MAX_BYTES = 150_000
SHOTS = {"report-desktop.png": (1280, 1030), "report-phone.png": (390, 1020)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    executable = chromium()
    if executable is None:
        print("no chromium on the PATH: the screenshots are not changed")
        return
    with browser_page(executable) as page:
        for name, (width, height) in SHOTS.items():
            page.open(arguments.report, width=width, height=height)
            shot = page.screenshot(height=height)
            if page.problems or len(shot) > MAX_BYTES:
                sys.exit(f"{name}: {len(shot):,} bytes of at most {MAX_BYTES:,}; {page.problems}")
            (arguments.out / name).write_bytes(shot)
            print(f"{arguments.out / name}: {len(shot):,} bytes")


if __name__ == "__main__":
    main()
