"""Parses YAML text to plain values, with the line number of each, and writes them.

The only reader of manifests and environment files. Interprets values as `kubectl` does (`yes` is
true, `1e-3` is a number, a date is a string). Input may be hostile: size, depth, alias expansion
and stored paths are limited, and no tag creates an object. Reports everything as `SpecError`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from dlion_api.errors import Problem, SpecError

MAX_BYTES: Final = 1024 * 1024
MAX_VALUES: Final = 100_000
MAX_DEPTH: Final = 64
MAX_PATH_CHARACTERS: Final = 16 * 1024 * 1024
"""Limit on all paths with a line together: a long key counts for everything below it."""
MAX_INTEGER_DIGITS: Final = 100
MAX_DUPLICATE_KEYS: Final = 100
_TAG: Final = "tag:yaml.org,2002:"
_TRUE: Final = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE: Final = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_TRUTH_IN_GO: Final = frozenset({"y", "Y", "n", "N"})
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0o[0-7]+|0b[01]+|[0-9]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")


@dataclass(frozen=True)
class YamlDocument:
    """One document of a file: its value, and the line of each path (`spec.sites[0].name`)."""

    value: Any
    lines: dict[str, int]


def parse_any_documents(text: str | bytes, *, source: str) -> list[YamlDocument]:
    """Parse the documents of a text, without empty ones. Raises `SpecError`; no retry helps."""
    if len(text) > MAX_BYTES:
        # Without its size: readers of files stop at the limit.
        problem = Problem("(document)", "is too large", allowed=f"up to {MAX_BYTES} bytes")
        raise SpecError([problem], source=source)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except _NotReadableError as error:
        raise SpecError([*builder.duplicates, error.problem], source=source) from None
    except yaml.MarkedYAMLError as error:
        line = getattr(error.problem_mark, "line", -1) + 1
        what, advice = error.problem or "", "Check the indentation."
        if "cannot start any token" in what:
            advice = "Put a value that begins with this character in quotes."
        if error.problem_mark is not None and _character_at(text, error.problem_mark) == "\t":
            what = "a tab indents the line, and YAML allows spaces only"
        problem = _unreadable(what, line or None, advice)
        raise SpecError([*builder.duplicates, problem], source=source) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise SpecError([_unreadable(str(error), None)], source=source) from None
    if builder.duplicates:
        raise SpecError(builder.duplicates, source=source)
    return [text for text in builder.documents if text.value is not None]


def parse_documents(text: str | bytes, *, source: str) -> list[YamlDocument]:
    """Parse the documents of a text, at least one. Raises `SpecError`; no retry helps."""
    documents = parse_any_documents(text, source=source)
    if not documents:
        raise SpecError([Problem("(document)", "is empty")], source=source)
    return documents


def single_document(documents: list[YamlDocument], *, source: str) -> YamlDocument:
    """The only document of a file. Raises `SpecError`; no retry helps."""
    if len(documents) > 1:
        problem = Problem(
            "(document)",
            "there are several documents in the file",
            value=str(len(documents)),
            allowed="1",
            advice="Keep one, or split the file at its --- lines.",
            line=documents[1].lines.get(""),
        )
        raise SpecError([problem], source=source)
    return documents[0]


# The C parser is two to ten times faster, and its nesting does not use Python's stack.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def to_yaml(document: object) -> str:
    """The text of plain values, which PyYAML, this module and `kubectl` read alike.

    >>> to_yaml({"runId": "1e3", "text": "a\\nb"})
    "runId: '1e3'\\ntext: |-\\n  a\\n  b\\n"
    """
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(_DUMPER):  # type: ignore[misc]  # it is one of the two
    """Quotes what other readers take for a number or truth value: `1e3`, `08`, `y`. PyYAML's own
    resolver does not. Writes texts of several lines as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        digits = data.replace("_", "")  # Go reads 1_2e3 as 12e3
        is_text = isinstance(plain_value(digits), str) and data not in _TRUTH_IN_GO
        style = "|" if "\n" in data else None if is_text else "'"
        node: yaml.ScalarNode = self.represent_scalar(f"{_TAG}str", data, style=style)
        return node


_Dumper.add_representer(str, _Dumper.represent_str)


def _unreadable(what: str, line: int | None, advice: str = "Check the indentation.") -> Problem:
    return Problem("(document)", f"is not YAML: {what}", line=line, advice=advice)


def _character_at(text: str | bytes, mark: Any) -> str:
    """The character that the parser stopped at; empty at the end of the text."""
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
    lines = decoded.split("\n")
    return lines[mark.line][mark.column : mark.column + 1] if mark.line < len(lines) else ""


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _NotReadableError(Exception):
    def __init__(self, event: Any, path: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        line = _line(event)
        self.problem = Problem(path or "(document)", message, line=line, advice=advice)


@dataclass
class _Frame:
    """A mapping or list in progress. `count`: values expanded so far; `depth`: levels, with it."""

    value: Any
    path: str
    anchor: str | None
    key: str | None = None
    count: int = 1
    depth: int = 1
    merged: list[dict[str, Any]] = field(default_factory=list)

    def child_path(self) -> str:
        if isinstance(self.value, list):
            return f"{self.path}[{len(self.value)}]"
        return f"{self.path}.{self.key}" if self.path else self.key or ""


@dataclass
class _Builder:
    """Builds values from parser events, without recursion."""

    documents: list[YamlDocument] = field(default_factory=list)
    frames: list[_Frame] = field(default_factory=list)
    anchors: dict[str, tuple[Any, int, int]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    duplicates: list[Problem] = field(default_factory=list)
    """Duplicate keys: the mapping's meaning is unclear, but parsing can continue."""
    path_characters: int = 0
    """Length of all stored paths, including those in `duplicates`."""

    def take(self, event: Any) -> None:
        match event:
            case yaml.DocumentStartEvent():
                self.anchors, self.lines = {}, {"": _line(event)}
            case yaml.ScalarEvent():
                self._scalar(event)
            case yaml.AliasEvent():
                if event.anchor not in self.anchors:
                    raise _NotReadableError(event, self._path(), f"*{event.anchor} is not known")
                self._line_of_item(event)
                self._put(event, *self.anchors[event.anchor])
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._open(event, {} if isinstance(event, yaml.MappingStartEvent) else [])
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._close(event)

    def _path(self) -> str:
        return self.frames[-1].child_path() if self.frames else ""

    def _awaits_key(self) -> bool:
        top = self.frames[-1] if self.frames else None
        return top is not None and isinstance(top.value, dict) and top.key is None

    def _open(self, event: Any, value: Any) -> None:
        if self._awaits_key():
            raise _NotReadableError(event, self.frames[-1].path, "has a key that is not a string")
        if event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            raise _NotReadableError(
                event, self._path(), f"has the tag {event.tag}, which is not read"
            )
        self._check_depth(event, 1)
        self._line_of_item(event)
        self.frames.append(_Frame(value, self._path(), event.anchor))

    def _close(self, event: Any) -> None:
        frame = self.frames.pop()
        for merged in frame.merged:
            for key, value in merged.items():
                frame.value.setdefault(key, value)
        if frame.anchor:
            self.anchors[frame.anchor] = (frame.value, frame.count, frame.depth)
        self._put(event, frame.value, frame.count, frame.depth)

    def _scalar(self, event: Any) -> None:
        if self._awaits_key():
            self._key(event)
            return
        value = _plain(event, self._path())
        if event.anchor:
            self.anchors[event.anchor] = (value, 1, 0)
        self._line_of_item(event)
        self._put(event, value, 1, 0)

    def _line_of_item(self, event: Any) -> None:
        if self.frames and isinstance(self.frames[-1].value, list):
            self._keep(event, self._path())

    def _keep(self, event: Any, path: str) -> None:
        self._count_path(event, path)
        self.lines[path] = _line(event)

    def _count_path(self, event: Any, path: str) -> None:
        self.path_characters += len(path)
        if self.path_characters > MAX_PATH_CHARACTERS:
            message = f"has keys whose paths come to more than {MAX_PATH_CHARACTERS} characters"
            raise _NotReadableError(event, "", message, "Give shorter keys, or nest them less.")

    def _key(self, event: Any) -> None:
        frame = self.frames[-1]
        frame.key = event.value
        path = frame.child_path()
        if event.value in frame.value:
            message = f"appears twice, first in line {self.lines.get(path)}"
            duplicate = _NotReadableError(event, path, message, "Keep one of them.")
            if len(self.duplicates) >= MAX_DUPLICATE_KEYS:
                raise duplicate
            self._count_path(event, path)
            self.duplicates.append(duplicate.problem)
            return
        self._keep(event, path)

    def _check_depth(self, event: Any, depth: int) -> None:
        if len(self.frames) + depth > MAX_DEPTH:
            raise _NotReadableError(event, "", f"is nested deeper than {MAX_DEPTH} levels")

    def _put(self, event: Any, value: Any, count: int, depth: int) -> None:
        if not self.frames:
            self.documents.append(YamlDocument(value, self.lines))
            return
        frame = self.frames[-1]
        if isinstance(frame.value, dict) and frame.key is None:
            raise _NotReadableError(event, frame.path, "has an alias for a key")
        self._check_depth(event, depth)
        frame.depth = max(frame.depth, depth + 1)
        frame.count += count
        if frame.count > MAX_VALUES:
            raise _NotReadableError(event, "", f"unfolds to more than {MAX_VALUES} values")
        if isinstance(frame.value, list):
            frame.value.append(value)
            return
        if frame.key == "<<":
            frame.merged.extend(_to_merge(event, value, frame.path))
        else:
            frame.value[frame.key] = value
        frame.key = None


def _to_merge(event: Any, value: Any, path: str) -> Iterator[dict[str, Any]]:
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict):
            raise _NotReadableError(event, path, "<< merges mappings only")
        yield each


def _plain(event: Any, path: str) -> Any:
    tag = event.tag if event.tag not in (None, "!") else ""
    if tag and tag.removeprefix(_TAG) not in ("str", "int", "float", "bool", "null"):
        raise _NotReadableError(event, path, f"has the tag {tag}, which is not read")
    quoted = event.tag is None and not event.implicit[0]
    if tag == f"{_TAG}str" or event.tag == "!" or quoted:
        return event.value
    return plain_value(event.value)


def plain_value(text: str) -> Any:
    """The value of an unquoted scalar.

    >>> [plain_value(text) for text in ("1e-3", "010", "on", "~", "2026-01-31", "12:30")]
    [0.001, 8, True, None, '2026-01-31', '12:30']
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        number = math.inf if special[2].lower() == "inf" else math.nan
        return -number if special[1] == "-" else number
    return text


def _integer(text: str) -> int | float | str:
    digits = text.lstrip("-+").lower()
    if len(digits) > MAX_INTEGER_DIGITS:
        return math.inf  # beyond every field's range
    if re.fullmatch(r"0[0-9]+", digits):
        if not re.fullmatch(r"0[0-7]+", digits):
            return float(text)
        digits = f"0o{digits[1:]}"
    number = int(digits, 0)
    return -number if text.startswith("-") else number
