"""Hostile manifests, `--set` assignments and environment files.

The result must be a `SpecError` with printable problems, or a document that is unchanged after
writing and reading.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import yaml

from dlion_api.errors import SpecError
from dlion_api.spec import Job, load_job
from dlion_cli.inputs.manifests import apply_set
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.yaml_text import parse_any_documents
from hostile import bending

ROOT = Path(__file__).parents[3]
BOMB = "a: &a [1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}, *{chr(97 + n)}]\n"
    for n in range(22)
)
ODD_WORDS = (
    "", "~", "yes", "-1", "0", "1.5", "1e999", "-.inf", ".nan", "0x", "0b2", "0o9", "010", "1_000",
    "12:30:45", "9" * 5000, "2026-13-45", "2026-01-31T25:61:61Z", "!!timestamp x", "!!int x",
    "!!float x", "!!bool x", "!!binary '%'", "!!set {a}", "!!omap [a]", "!!pairs [1]", "!!null x",
    "!!python/object/apply:os.system [x]", "!x y", "! z", "&a [*a]", "&a {b: *a}", "*none", "*a",
    "<<", "? [a, b]", "{[]: 1}", "{1: 2}", "{a: 1, a: 2}", "[" * 300, "{" * 100, "[" * 100_000,
    "'", '"\\x', '"\\ud800"', "|", ">-", "%YAML 9.9", "---", "...", "\t", "# x", "@", "`",
    "x" * 5000, "é", "\u2028", "\x00", "\x85", "[" + "1," * 5000 + "]", "${HOME}", "../../etc",
)  # fmt: skip


@functools.cache
def valid_texts(folder: str) -> tuple[str, ...]:
    """The files of the repository's folder of that name."""
    return tuple(path.read_text() for path in sorted((ROOT / folder).glob("*.yaml")))


def altered_text(rng: random.Random, valid: str) -> bytes:
    """Return a YAML text with lines, values or bytes altered, or a document with values altered."""
    if rng.randrange(3) == 0:
        value = bending.value_of(rng, yaml.safe_load(valid))
        return json.dumps(value).encode("utf-8", "surrogatepass")
    lines = valid.splitlines()
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        name, colon, rest = lines[at].partition(":")
        word = rng.choice(ODD_WORDS)
        match rng.randrange(8):
            case 0:
                lines[at:] = [*lines[at + 1 :], ""]
            case 1:
                lines.insert(rng.randrange(len(lines) + 1), lines[at])
            case 2:
                lines[at] = " " * rng.randrange(9) + lines[at].lstrip()
            case 3 if colon:
                lines[at] = f"{name}: &a {rest.strip() or 'x'}"
            case 4:
                lines.insert(at, rng.choice((word, f"<<: {word}", f"{word}: 1", BOMB)))
            case _:
                lines[at] = f"{name}{colon or ':'} {word}"
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return bending.bytes_of(rng, data) if rng.randrange(4) == 0 else data


def attack_manifest(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile manifest like `dlion validate` and `dlion run`."""
    valid = rng.choice(valid_texts("examples"))
    data = bending.until_different(valid.encode(), lambda: altered_text(rng, valid))
    try:
        texts = parse_any_documents(data, source="hostile")
    except SpecError as error:
        _printable(error)
        return "refused"
    words = [_is_accepted(text.value, text.lines) for text in texts]
    return "taken" if words and all(words) else "refused"


def _is_accepted(value: Any, lines: dict[str, int]) -> bool:
    """Whether it is a valid job. Then it is unchanged after writing and reading."""
    try:
        job = load_job(value, source="hostile", lines=lines)
    except SpecError as error:
        _printable(error)
        return False
    again = load_job(json.loads(json.dumps(job.to_document())))
    assert isinstance(again, Job)
    assert again.hash() == job.hash()
    return True


def attack_set(rng: random.Random, folder: Path) -> str | None:
    """Apply one to three hostile `--set` assignments to a valid manifest."""
    valid = _valid_document()
    assignments = [_assignment(rng) for _ in range(rng.choice((1, 1, 3)))]
    try:
        changed = apply_set(valid, assignments)
    except SpecError as error:
        _printable(error)
        return "refused"
    if changed == valid:
        return None
    return "taken" if _is_accepted(changed, {}) else "refused"


@functools.cache
def _valid_document() -> dict[str, Any]:
    document: dict[str, Any] = parse_any_documents(valid_texts("examples")[0], source="right")[
        0
    ].value
    return document


def _assignment(rng: random.Random) -> str:
    steps = ("spec", "sites", "[0]", "[1]", "[999999]", "[-1]", "groups", "workers", "trainer",
             "dataset", "stop", "maxSteps", "", ".", "x", "metadata", "name", "exchange", "policy",
             "[", "é")  # fmt: skip
    path = ".".join(rng.choice(steps) for _ in range(rng.randint(1, 6))).replace(".[", "[")
    if rng.random() < 0.5:
        path = rng.choice(("trainer.stop.maxSteps", "sites[0].name", "exchange.codec",
                              "sites[0].groups[0].workers", "trainer.optimizer"))  # fmt: skip
    equals = "" if rng.random() < 0.05 else "="
    return f"{path}{equals}{rng.choice((*ODD_WORDS, BOMB))}"


def attack_environment(rng: random.Random, folder: Path) -> str | None:
    """Read one hostile environment file."""
    valid = rng.choice(valid_texts("environments"))
    path = folder / "hostile.yaml"
    path.write_bytes(bending.until_different(valid.encode(), lambda: altered_text(rng, valid)))
    try:
        environment = load_environment(path)
    except SpecError as error:
        _printable(error)
        return "refused"
    assert isinstance(environment, Environment)
    return "taken"


def _printable(error: SpecError) -> None:
    assert error.problems
    text = str(error)
    assert len(text) < 1_000_000
    text.encode("utf-8", "backslashreplace")  # as on standard error
