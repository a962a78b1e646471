"""Tests of the reasons of directives, which `events.jsonl` and the report show.

A heat budget that follows the noise of its readings is no reason, whatever else changed. One that
begins or ends to limit is a reason, however little it limits.

Left out: other reasons (doctests); when a directive is made (test_resource_controller.py).
"""

from __future__ import annotations

import pytest

from dlion_api.protocol.measurements import Directive
from dlion_core.resource_control.directive_reasons import reason_for


def test_a_heat_budget_that_changed_by_noise_is_no_reason() -> None:
    before = Directive(1, 48, 192, compute_share=0.62)
    after = Directive(2, 60, 240, compute_share=0.624)
    assert reason_for(before, after) == "global batch rose from 192 to 240 samples"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (0.997, 1.0, "rose from 99.7% to 100%"),
        (1.0, 0.997, "fell from 100% to 99.7%"),
        (0.5, 0.53, "rose from 50% to 53%"),
    ],
)
def test_a_heat_budget_that_changes_what_it_limits_is_a_reason(
    old: float, new: float, text: str
) -> None:
    before, after = (Directive(n, 48, 192, compute_share=s) for n, s in ((1, old), (2, new)))
    assert reason_for(before, after) == f"the heat budget {text} of compute"
