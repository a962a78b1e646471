"""Test declared documents: strict parsing with all problems, rendering, explanation.

Each kind of problem has path, value, allowed values, advice and line. Rules run only on valid
fields. A parsed document renders to a text that parses to the same. Hostile input is refused
quickly.

Left out: the schema (tests/contract) and the manifest's own fields.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from dlion_api.document import (
    Check,
    IsValid,
    Limits,
    Rule,
    at_most_one,
    exactly_one,
    explain,
    parse,
    schema,
    setting,
    to_document,
)
from dlion_api.errors import Problem, SpecError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel."""

    name: str = setting("name of the wheel.", pattern="[a-z]+", max_length=8)
    spokes: int = setting("number of spokes.", default=32, minimum=0, maximum=64)


@dataclass(frozen=True, kw_only=True)
class Cart:
    """A cart with wheels."""

    owner: str = setting("who owns it.", max_length=10)
    colour: Literal["red", "blue"] = setting("its colour.", default="red")
    load_kg: float = setting("what it carries.", default=0.0, minimum=0, below=100, unit="kg")
    covered: bool = setting("whether it has a roof.", default=False)
    wheels: tuple[Wheel, ...] = setting("its wheels.", default=(), key="name", max_items=4)
    tags: tuple[Annotated[str, Limits(max_length=4)], ...] = setting(
        "tags.", default=(), unique=True, max_items=3
    )
    papers: Mapping[str, Annotated[str, Limits(max_length=5)]] = setting(
        "papers.", default={}, max_items=2
    )
    anything: Mapping[str, Any] | None = setting("not checked.", default=None)
    horse: str | None = setting("pulled by a horse.", default=None, max_length=9)
    ox: str | None = setting("pulled by an ox.", default=None, max_length=9)

    rules: ClassVar[tuple[Rule, ...]] = (
        at_most_one(horse="horse", ox="ox"),
        Rule(
            cel="self.loadKg <= 10.0 || size(self.wheels) >= 2",
            message="a heavy cart needs two wheels",
            holds=lambda it: it.load_kg <= 10 or len(it.wheels) >= 2,
            reads=("loadKg", "wheels"),
        ),
    )


def problems(document: object, lines: Mapping[str, int] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        parse(Cart, document, source="cart.yaml", lines=lines)
    return caught.value.problems


def test_defaults_are_set_and_the_document_renders_back() -> None:
    cart = parse(Cart, {"owner": "ann", "wheels": [{"name": "a"}], "anything": {"x": [None, 1]}})
    assert cart.wheels == (Wheel(name="a", spokes=32),)
    document = to_document(cart)
    assert document["wheels"] == [{"name": "a", "spokes": 32}]
    assert "horse" not in document
    assert parse(Cart, document) == cart


def test_all_problems_are_reported_in_the_order_of_the_text() -> None:
    document = {
        "colour": "green",
        "loadkg": 5,
        "covered": "yes",
        "wheels": [{"name": "a"}, {"name": "a", "spokes": 65}, {}],
        "horse": "h",
        "ox": "o",
    }
    lines = {"": 1, "colour": 1, "loadkg": 2, "covered": 3, "wheels": 4, "wheels[1]": 6,
             "wheels[1].name": 6, "wheels[1].spokes": 7, "wheels[2]": 8, "horse": 9}  # fmt: skip
    found = [(p.line, p.path) for p in problems(document, lines)]
    assert found == [
        (1, "owner"),
        (1, "colour"),
        (1, "(document)"),
        (2, "loadkg"),
        (3, "covered"),
        (6, "wheels[1].name"),
        (7, "wheels[1].spokes"),
        (8, "wheels[2].name"),
    ]


@pytest.mark.parametrize(
    ("change", "path", "value", "allowed"),
    [
        ({"loadKg": 100}, "loadKg", "100", "at least 0, below 100"),
        ({"loadKg": float("nan")}, "loadKg", "nan", "at least 0, below 100"),
        ({"loadKg": float("-inf")}, "loadKg", "-inf", "at least 0, below 100"),
        ({"loadKg": 10**400}, "loadKg", "an integer of 1329 bits", "at least 0, below 100"),
        ({"colour": "green"}, "colour", '"green"', "red, blue"),
        ({"covered": 1}, "covered", "1", "true, false"),
        ({"owner": "x" * 11}, "owner", '"xxxxxxxxxxx"', "up to 10"),
        ({"wheels": "none"}, "wheels", '"none"', ""),
        ({"wheels": [{"name": "A"}]}, "wheels[0].name", '"A"', "[a-z]+"),
        ({"tags": ["a", "b", "c", "d"]}, "tags", "4", "at most 3"),
        ({"tags": ["a", "a"]}, "tags[1]", '"a"', "once"),
        ({"papers": {"a": "b" * 6}}, "papers.a", '"bbbbbb"', "up to 5"),
        ({"papers": {"a": "", "b": "", "c": ""}}, "papers", "3", "at most 2"),
        ({"anything": {"a": object()}}, "anything", "a object", "strings, numbers"),
        ({"owner": 7}, "owner", "7", ""),
    ],
)
def test_a_problem_states_the_value_and_the_allowed_values(
    change: dict[str, Any], path: str, value: str, allowed: str
) -> None:
    (problem,) = problems({"owner": "ann"} | change)
    assert (problem.path, problem.value) == (path, value)
    assert problem.allowed.startswith(allowed)


def test_an_unknown_field_names_the_nearest_known_one() -> None:
    (problem,) = problems({"owner": "ann", "whels": []})
    assert problem.path == "whels"
    assert problem.advice == "Did you mean wheels?"
    assert "colour" in problem.allowed


def test_a_missing_field_has_the_line_of_its_parent() -> None:
    lines = {"": 1, "wheels": 3, "wheels[0]": 4}
    (problem,) = problems({"owner": "ann", "wheels": [{"spokes": 3}]}, lines)
    assert (problem.path, problem.line) == ("wheels[0].name", 4)
    assert str(problem).startswith("line 4: wheels[0].name: is missing; allowed: a string.")
    assert ". Meaning: " in str(problem)


def test_a_rule_runs_only_on_valid_fields() -> None:
    heavy = {"owner": "ann", "loadKg": 50}
    assert [p.message for p in problems(heavy)] == ["a heavy cart needs two wheels"]
    unsound = heavy | {"wheels": [{"name": "A"}]}
    assert [p.path for p in problems(unsound)] == ["wheels[0].name"]
    elsewhere = heavy | {"colour": "green"}
    assert [p.path for p in problems(elsewhere)] == ["colour", "loadKg"]


def test_exactly_one_of_several_fields() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Choice:
        a_b: int | None = setting("a.", default=None, minimum=0, maximum=9)
        c: int | None = setting("c.", default=None, minimum=0, maximum=9)
        rules: ClassVar[tuple[Rule, ...]] = (exactly_one(a_b="aB", c="c"),)

    assert parse(Choice, {"aB": 0}).a_b == 0
    for wrong in ({}, {"aB": 1, "c": 2}):
        with pytest.raises(SpecError, match="exactly one of aB, c must be given"):
            parse(Choice, wrong)
    (rule,) = schema(Choice)["x-kubernetes-validations"]
    assert rule["rule"] == "(has(self.aB) ? 1 : 0) + (has(self.c) ? 1 : 0) == 1"


@pytest.mark.parametrize("document", [None, [], "cart", 3, {1: 2}, {None: 1}])
def test_anything_but_a_mapping_of_names_is_refused(document: object) -> None:
    assert problems(document)[0].path == "(document)"


def test_a_deep_or_endless_value_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    (problem,) = problems({"owner": "ann", "anything": endless})
    assert "too deep" in problem.message


def test_paths_with_special_characters_are_parsed() -> None:
    found = problems({"owner": "ann", "].[": 1, ".": 2}, {"owner": 1})
    assert [p.line for p in found] == [None, None]


def test_a_flood_of_unknown_fields_is_truncated() -> None:
    began = time.process_time()
    found = problems({"owner": "ann"} | {f"x{i}": i for i in range(20_000)})
    assert time.process_time() - began < 5
    assert len(found) == 101
    assert "19900 more" in found[-1].message


def test_an_explanation_states_type_default_limits_and_rules() -> None:
    field = explain(Cart, "loadKg")
    assert field.type == "number"
    assert field.doc == "What it carries. In kg."
    assert field.allowed == "at least 0, below 100"
    assert (field.required, field.default) == (False, 0.0)
    wheels = explain(Cart, "wheels")
    assert wheels.type == "list of object"
    assert [child.path for child in wheels.children] == ["wheels.name", "wheels.spokes"]
    assert explain(Cart, "wheels[2].name").required
    assert "a heavy cart needs two wheels" in explain(Cart).rules


def test_explaining_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="Did you mean spokes"):
        explain(Cart, "wheels.spoke")


def _needs_a_wheel_for_each_tag(it: Any, sound: IsValid) -> Iterator[Problem]:
    for index in range(len(getattr(it, "tags", ()))):
        if sound(f"tags[{index}]") and sound("wheels") and index >= len(it.wheels):
            yield Problem(f"tags[{index}]", "has no wheel")


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """Wheels and their tags."""

    wheels: tuple[Wheel, ...] = setting("its wheels.", default=(), max_items=4)
    tags: tuple[Annotated[str, Limits(max_length=4)], ...] = setting("tags.", default=())
    checks: ClassVar[tuple[Check, ...]] = (_needs_a_wheel_for_each_tag,)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"wheels": [{"name": "a"}], "tags": ["x", "y"]}, ["tags[1]: has no wheel"]),
        ({"tags": ["toolong", "y"]}, ["tags[0]: is too long", "tags[1]: has no wheel"]),
        ({"wheels": [{"name": "A"}], "tags": ["x"]}, ["wheels[0].name: has the wrong form"]),
        ({"wheels": 1, "tags": ["x"]}, ["wheels: must be a list"]),
    ],
)
def test_a_check_names_the_places_of_readable_fields(document: object, expected: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse(Tagged, document)
    problems_found = [str(problem) for problem in caught.value.problems]
    assert all(text.startswith(start) for text, start in zip(problems_found, expected, strict=True))
    with pytest.raises(SpecError) as caught:
        parse(Tagged, document, root="in.it", lines={"in.it": 1, "in.it.tags[1]": 7})
    assert {p.line for p in caught.value.problems if p.path == "in.it.tags[1]"} <= {7}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A number without limits, as parameters of a policy of one's own may have."""

    factor: float = setting("multiplies.", default=1.0)


def test_a_whole_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(SpecError, match=r"factor: is out of bounds \(given: an integer"):
        parse(Scale, {"factor": 10**400})
    assert parse(Scale, {"factor": 10**300}) == Scale(factor=1e300)
