"""Tests of `exchange.proto` against the messages of workers: their kinds and numbers, and the kinds
whose `weights_version` is not 0.

Left out: the meaning of the numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dlion_api.wire import exchange_pb2
from dlion_core.policies.interface import MessageKind

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "api" / "proto" / "dlion_api" / "wire" / "exchange.proto"
PLACE = 3
"""Position of `weights_version` among the positional arguments of a `Message`."""


def kinds_within(node: ast.AST) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "MessageKind"
    }


def gives_a_version(call: ast.Call) -> bool:
    is_message = isinstance(call.func, ast.Name) and call.func.id == "Message"
    named = {keyword.arg for keyword in call.keywords}
    return is_message and (len(call.args) > PLACE or "weights_version" in named)


def kinds_with_a_version() -> Iterator[str]:
    """Kinds of the messages made with one; for a kind in a variable, all kinds that its function
    names.
    """
    for path in (ROOT / "worker").rglob("*.py"):
        text = path.read_text("utf-8")
        for function in ast.walk(ast.parse(text)) if "Message(" in text else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and gives_a_version(call):
                    yield from kinds_within(call) or kinds_within(function)


def test_kinds_and_their_numbers_are_those_on_the_wire() -> None:
    wire = {name.removeprefix("MESSAGE_KIND_"): n for name, n in exchange_pb2.MessageKind.items()}
    assert wire == {"UNSPECIFIED": 0, **{kind.name: kind.value for kind in MessageKind}}


def test_the_proto_explains_weights_version_for_each_kind_that_has_it() -> None:
    above = PROTO.read_text("utf-8").partition("uint64 weights_version")[0].splitlines()[:-1]
    comment: list[str] = []
    while above[-1].lstrip().startswith("//"):
        comment.append(above.pop())
    heads = [re.match(r"\s*//\s+([A-Z, ]+):", line) for line in comment]
    documented = {kind for head in heads if head is not None for kind in head[1].split(", ")}
    assert documented == set(kinds_with_a_version())
