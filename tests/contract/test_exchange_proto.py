"""Contract: what `exchange.proto` says of messages is what workers send: their kinds and numbers,
and in which kinds `weights_version` is not 0. Left out: what the numbers in it mean.
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
"""Of `weights_version` among the positional arguments of a `Message`."""


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
    """Kinds of the messages that are made with one; of a kind in a variable, all that its function
    names."""
    for path in (ROOT / "worker").rglob("*.py"):
        text = path.read_text("utf-8")
        for function in ast.walk(ast.parse(text)) if "Message(" in text else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and gives_a_version(call):
                    yield from kinds_within(call) or kinds_within(function)


def test_kinds_and_their_numbers_are_the_wires() -> None:
    wire = {name.removeprefix("MESSAGE_KIND_"): n for name, n in exchange_pb2.MessageKind.items()}
    assert wire == {"UNSPECIFIED": 0, **{kind.name: kind.value for kind in MessageKind}}


def test_the_proto_says_what_a_weights_version_is_in_each_kind_that_has_one() -> None:
    above = PROTO.read_text("utf-8").partition("uint64 weights_version")[0].splitlines()[:-1]
    comment: list[str] = []
    while above[-1].lstrip().startswith("//"):
        comment.append(above.pop())
    heads = [re.match(r"\s*//\s+([A-Z, ]+):", line) for line in comment]
    said = {kind for head in heads if head is not None for kind in head[1].split(", ")}
    assert said == set(kinds_with_a_version())
