"""Whether a directive differs from the one before, and how, for `events.jsonl` and the report."""

from collections.abc import Iterator, Mapping

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive

BUDGET_TOLERANCE_FRACTION = 0.05
DATA_TOLERANCE_FRACTION = 0.01
COMPUTE_SHARE_TOLERANCE = 0.02

MAX_CHANGES = 6
NOTABLE_FRACTION = 0.02
MAX_GROUPS_CHARACTERS = 200
"""Limit for the list of group members; beyond it only the numbers are shown."""


def differs(last: Directive, wanted: Directive) -> bool:
    """Whether a directive differs from the last one by more than noise."""
    more = abs(wanted.training_set_samples - last.training_set_samples)
    return (
        _is_other_share(last.compute_share, wanted.compute_share)
        or last.local_batch_size != wanted.local_batch_size
        or last.global_batch_size != wanted.global_batch_size
        or last.grouping != wanted.grouping
        or more > DATA_TOLERANCE_FRACTION * last.training_set_samples
        or last.budget_bytes.keys() != wanted.budget_bytes.keys()
        or any(
            abs(wanted.budget_bytes[peer] - budget) > BUDGET_TOLERANCE_FRACTION * budget
            for peer, budget in last.budget_bytes.items()
        )
    )


def _is_other_share(old: float, new: float) -> bool:
    """Whether the heat budget changed by more than its readings do, or begins or ends to limit."""
    return abs(new - old) > COMPUTE_SHARE_TOLERANCE or (new == 1.0) != (old == 1.0)


def is_complete(last: Directive, wanted: Directive, active: list[Rank]) -> bool:
    """Whether every capacity is known now for the first time: a trainer waits for that."""
    return last.capacities.keys() < wanted.capacities.keys() == set(active)


def reason_for(before: Directive | None, after: Directive) -> str:
    """One line.

    >>> first = Directive(1, 48, 192, capacities={Rank(2): 310.0})
    >>> reason_for(first, Directive(2, 60, 192, capacities={Rank(2): 150.0}))
    'capacity of 2 fell from 310 to 150 samples/s'
    """
    if before is None:
        return f"first directive: {after.local_batch_size} of {after.global_batch_size} samples"
    changes = [
        *_groups(before, after),
        *_compute_share(before, after),
        *_batch_and_data(before, after),
        *_value_changes("capacity of {}", before.capacities, after.capacities, 1.0, "samples/s"),
        *_value_changes(
            "rate of the link to {}",
            before.bandwidth_bytes_per_s,
            after.bandwidth_bytes_per_s,
            1e-6,
            "MB/s",
        ),
    ]
    if not changes:
        changes = [*_budgets(before, after)]
    more = len(changes) - MAX_CHANGES
    return "; ".join(changes[:MAX_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def _groups(before: Directive, after: Directive) -> list[str]:
    """Groups by their members, gateways first.

    >>> from dlion_api.protocol.measurements import Grouping
    >>> first = Directive(1, 48, 192, grouping=Grouping(0, 0, ((0, 1, 2),), (0,)))
    >>> second = Directive(2, 48, 192, grouping=Grouping(1, 0, ((0, 1), (2,)), (1, 2)))
    >>> reason_for(first, second)
    'worker 0 made groups (1) of links: 1 0 | 2'
    """
    grouping = after.grouping
    if grouping is None or grouping == before.grouping:
        return []
    pairs = zip(grouping.groups, grouping.gateways, strict=True)
    groups_text = " | ".join(
        " ".join(map(str, [gateway, *(rank for rank in group if rank != gateway)]))
        for group, gateway in pairs
    )
    if len(groups_text) > MAX_GROUPS_CHARACTERS:
        groups_text = f"{len(grouping.groups)} of {sum(map(len, grouping.groups))} workers"
    return [f"worker {grouping.decider} made groups ({grouping.version}) of links: {groups_text}"]


def _compute_share(before: Directive, after: Directive) -> Iterator[str]:
    """The heat budget. Each reading changes it a little, which decides nothing.

    >>> reason_for(Directive(1, 48, 192), Directive(2, 48, 192, compute_share=0.625))
    'the heat budget fell from 100% to 62.5% of compute'
    """
    old, new = before.compute_share, after.compute_share
    if _is_other_share(old, new):
        shares = f"from {100 * old:.3g}% to {100 * new:.3g}%"
        yield f"the heat budget {_direction(old, new)} {shares} of compute"


def _batch_and_data(before: Directive, after: Directive) -> Iterator[str]:
    old, new = before.global_batch_size, after.global_batch_size
    if old != new:
        yield f"global batch {_direction(old, new)} from {old} to {new} samples"
    if after.training_set_samples != before.training_set_samples:
        yield f"the training set has {after.training_set_samples} samples"


def _value_changes(
    what: str, before: Mapping[Rank, float], after: Mapping[Rank, float], scale: float, unit: str
) -> Iterator[str]:
    if before == after:
        return
    for rank in sorted(before.keys() | after.keys()):
        old, new = before.get(rank), after.get(rank)
        if old is not None and new is not None and abs(new - old) <= NOTABLE_FRACTION * old:
            continue
        name = what.format(rank)
        if old is None and new is not None:
            yield f"{name} is {new * scale:.3g} {unit}"
        elif new is None:
            yield f"{name} no longer counts"
        elif old is not None:
            direction = _direction(old, new)
            yield f"{name} {direction} from {old * scale:.3g} to {new * scale:.3g} {unit}"


def _budgets(before: Directive, after: Directive) -> list[str]:
    """Budgets changed though rates did not: iterations take another time, or bytes are in
    flight."""
    old, new = sum(before.budget_bytes.values()), sum(after.budget_bytes.values())
    if old != new:
        return [f"budgets {_direction(old, new)} from {old} to {new} bytes an iteration"]
    old, new = before.local_batch_size, after.local_batch_size
    return [f"batch {_direction(old, new)} from {old} to {new} samples: workers came or left"]


def _direction(old: float, new: float) -> str:
    return "rose" if new > old else "fell"
