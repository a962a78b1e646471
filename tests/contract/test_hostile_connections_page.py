"""Tests of docs/several-sites.md: it explains every reason of a refusal, and has the number of
tested connections.

Left out: the refusals and their reports (tests/cluster/test_hostile_connections).
"""

from __future__ import annotations

import re
from pathlib import Path

from dlion_api.protocol.refusals import PeerRefusal, RefusalReason
from dlion_operator.federation.refusals import FederationRefusalReason as SiteRefusalReason
from hostile_cases import CASES

PAGE = (Path(__file__).parents[2] / "docs/several-sites.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## What is refused, and how it is reported\n")[2].partition("\n## ")[0]


def test_the_page_has_the_number_of_tested_connections() -> None:
    (number,) = re.findall(r"more than (\d+) hostile and mistaken connections", SECTION)
    assert len({(case.at, case.who) for case in CASES}) == len(CASES) > int(number)


def test_exactly_the_reasons_are_explained() -> None:
    documented = re.findall(r"^- `(\w+)`: .+$", SECTION, flags=re.MULTILINE)
    reasons = {*RefusalReason, *SiteRefusalReason, *PeerRefusal}
    assert sorted(documented) == sorted({str(reason) for reason in reasons})
