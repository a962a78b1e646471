"""Test the patch from one status to another, and which patches may wait.

The patch gives the new status by the rules of RFC 7396. Figures and messages may wait. The status
and the reason of a condition may not.

Left out: when the patch is sent (test_object_applier).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_operator.apply.status_patch import (
    ACTIVE_S,
    MAX_TELEMETRY_PER_S,
    TELEMETRY_EVERY_S,
    is_telemetry,
    merge_patch,
    telemetry_interval_s,
)

leaves = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)
documents = st.recursive(
    st.dictionaries(st.sampled_from("abc"), leaves),
    lambda inner: st.dictionaries(st.sampled_from("abc"), leaves | inner),
    max_leaves=8,
)


def merged(target: Any, patch: Any) -> Any:
    """Apply the pseudocode of RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


@given(old=documents, new=documents)
def test_merged_into_the_old_status_it_gives_the_new_one(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    patch = merge_patch(old, new)
    assert merged(old, patch) == new
    assert (patch == {}) == (old == new)


CONDITION = {
    "type": "Ready",
    "status": "True",
    "reason": "Training",
    "observedGeneration": 1,
    "message": "3 of 3",
}


@pytest.mark.parametrize(
    ("changes", "may_wait"),
    [
        ({"message": "2 of 3"}, True),
        ({"status": "False"}, False),
        ({"reason": "PeerLost"}, False),
        ({"observedGeneration": 2}, False),
    ],
)
def test_only_the_message_of_a_condition_may_wait(changes: dict[str, Any], may_wait: bool) -> None:
    old = {"conditions": [CONDITION], "runId": "1"}
    patch = {"conditions": [{**CONDITION, **changes}]}
    assert is_telemetry(old, patch) is may_wait
    assert not is_telemetry(old, {**patch, "runId": "2"})


def test_jobs_that_have_ended_do_not_delay_the_progress_of_those_that_train() -> None:
    now_s = 10_000.0
    training, ended = [now_s - 5] * 50, [now_s - 2 * ACTIVE_S] * 5000
    never = [float("-inf")] * 5000
    assert telemetry_interval_s([*training, *ended, *never], now_s) == TELEMETRY_EVERY_S
    assert telemetry_interval_s(training * 20, now_s) == 1000 / MAX_TELEMETRY_PER_S
    assert telemetry_interval_s([], now_s) == TELEMETRY_EVERY_S
