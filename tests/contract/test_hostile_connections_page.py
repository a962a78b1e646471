"""docs/several-sites.md has the matrix of hostile and mistaken connections as it is tested, and
names every reason of a refusal.

Left out: that each is refused and told so (tests/cluster/test_hostile_connections).
"""

from __future__ import annotations

import re
from pathlib import Path

from dlion_api.protocol.refusals import PeerRefusal, RefusalReason
from dlion_operator.federation.refusals import FederationRefusalReason as SiteRefusalReason
from hostile_cases import CASES, table

PAGE = (Path(__file__).parents[2] / "docs/several-sites.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## What is refused, and how it is reported\n")[2].partition("\n## ")[0]


def test_the_page_has_the_matrix() -> None:
    lines = [line for line in SECTION.splitlines() if line.startswith("|")]
    matrix = table(CASES)
    begin = lines.index(matrix[0])
    assert lines[begin : begin + len(matrix)] == matrix


def test_no_two_rows_are_the_same() -> None:
    assert len({(case.at, case.who) for case in CASES}) == len(CASES) >= 20


def test_every_reason_is_explained_and_no_other() -> None:
    told = re.findall(r"^\| `(\w+)` \| .+ \|$", SECTION, flags=re.MULTILINE)
    reasons = {*RefusalReason, *SiteRefusalReason, *PeerRefusal}
    assert sorted(told) == sorted({str(reason) for reason in reasons})
