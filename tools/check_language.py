"""Check that pages, Python sources and YAML files use plain English.

Pages: no banned word, no sentence over 30 words, 16 on average. Code is left out. Python: no banned
word in docstrings, comments and identifiers, and no docstring that begins with "Of" or "That".
YAML files and templates of the chart: no banned word.
Exits with 1 and names the lines on an offence.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("api", "operator", "worker", "cli", "tests", "tools", "benchmarks", "examples")
PAGES = ("README.md", "SECURITY.md")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
YAML = (*SOURCES, "config", "crds", "helm")
RECORDED = (
    "benchmarks/paper/reduced/",
    "benchmarks/paper/environments/",
    "worker/dlion_environments/files/hetero-cpu-a.yaml",
    "worker/dlion_environments/files/homo-a.yaml",
)
"""Files whose text is part of the digest of recorded figures: they are not edited."""
MAX_WORDS, MAX_MEAN = 30, 16.0
BANNED = (
    "told|tells?|whoever|whosoever|whom|in vain|hitherto|thereof|therein|wherein|whereof|anew"
    "|afresh|for ever|lest|nought|errands?|nobody|somebody|of chance|beside which|is another than"
    "|such as are|said|says|saying|seen|dear|tried is|come again|goes on|went on|comes? back"
    "|came back|of ours|learnt|anybody|everybody|askers?|all in all|hardly|held against"
)
BANNED_WORD = re.compile(rf"\b(?:{BANNED})\b".replace(" ", r"\s+"), re.IGNORECASE)
BANNED_PARTS = {
    *("told", "said", "says", "seen", "whoever", "whom", "nobody", "somebody", "anew"),
    *("asker", "learnt", "anybody", "everybody", "tell", "tells"),
}
FOREIGN_NAMES = {"tell"}
"""`tell` is a method of files."""
QUAINT_BOUND = re.compile(r"_?(?:most|least)_(?!common$)", re.IGNORECASE)
"""A bound is `max_` or `min_`; `most_common` is a method of `collections.Counter`."""
FRAGMENT = re.compile(r"(?:Of|That|Those) ")
"""Begins a docstring that does not name what it describes."""
FRAGMENT_START = re.compile(rf"[\"'](?:{FRAGMENT.pattern})")
NAME = re.compile(r"[^\W\d]\w*")
IDENTIFIER_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
CODE_BLOCK = re.compile(r"^ *```.*?^ *``` *$|<!--.*?-->", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?:])[\"')*_]*\s+")
LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


class Offence(NamedTuple):
    line: int
    problem: str


def _without_code(page: str) -> str:
    """Remove code but keep line breaks, so that later lines keep their numbers."""
    page = CODE_BLOCK.sub(lambda match: "\n" * match.group().count("\n"), page)
    page = INLINE_CODE.sub(lambda match: "code" + "\n" * match.group().count("\n"), page)
    return LINK.sub(lambda match: match.group(1), page)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items with their first line; headings and tables are left out."""
    start, gathered = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        alone = not line.strip() or line.lstrip().startswith(("#", "|", "<"))
        if gathered and (alone or LIST_ITEM.match(line)):
            yield start, " ".join(gathered)
            gathered = []
        if not alone:
            start = start if gathered else number
            gathered.append(LIST_ITEM.sub("", line).strip(" >"))


def sentence_lengths(paragraph: str) -> list[int]:
    """Count the words of each sentence; a colon ends one, too."""
    sentences = SENTENCE_END.split(paragraph)
    return [n for each in sentences if (n := len(re.findall(r"\w[\w'.,/-]*", each)))]


def page_offences(page: str) -> list[Offence]:
    """Find what breaks the rules in a Markdown page."""
    text = _without_code(page)
    found, lengths = list(_banned_words(text, 1)), list[int]()
    for line, paragraph in paragraphs(text):
        here = sentence_lengths(paragraph)
        lengths += here
        found += [Offence(line, f"sentence of {n} words") for n in here if n > MAX_WORDS]
    if (mean := sum(lengths) / max(len(lengths), 1)) > MAX_MEAN:
        found.append(Offence(1, f"mean sentence of {mean:.1f} words"))
    return found


def source_offences(source: str) -> list[Offence]:
    """Find banned words and identifiers in a Python source."""
    if not _may_offend(source):  # parsing every source takes four times as long
        return []
    found = list[Offence]()
    for node in ast.walk(ast.parse(source)):
        match node:  # docstrings, those of fields and constants included
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                found += _banned_words(INLINE_CODE.sub("code", text), line)
                if FRAGMENT.match(text):
                    found.append(Offence(line, "docstring without a subject"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += _banned_words(token.string, token.start[0])
        elif token.type == tokenize.NAME and _is_banned(token.string):
            found.append(Offence(token.start[0], f"identifier {token.string}"))
    return found


def _may_offend(source: str) -> bool:
    """Report whether any part of a source, its strings included, would be an offence."""
    is_worded = BANNED_WORD.search(source) or FRAGMENT_START.search(source)
    return bool(is_worded) or any(map(_is_banned, set(NAME.findall(source))))


def _is_banned(name: str) -> bool:
    if name in FOREIGN_NAMES:
        return False
    parts = (part.lower() for part in IDENTIFIER_PART.findall(name))
    return bool(QUAINT_BOUND.match(name)) or not BANNED_PARTS.isdisjoint(parts)


def _banned_words(text: str, line: int) -> Iterator[Offence]:
    for match in BANNED_WORD.finditer(text):
        words = " ".join(match.group().split())
        yield Offence(line + text.count("\n", 0, match.start()), f"banned: {words}")


def yaml_offences(text: str) -> list[Offence]:
    """Find banned words in a YAML file, or a template of one."""
    return list(_banned_words(text, 1))


CHECKS = {".md": page_offences, ".py": source_offences}


def all_offences(root: Path) -> dict[str, list[Offence]]:
    """Offences of each file that has any, by its path from `root`."""
    paths = [path for name in PAGES if (path := root / name).is_file()]
    paths += sorted((root / "docs").rglob("*.md"))
    paths += [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    for suffix in (".yaml", ".tpl"):
        paths += [path for folder in YAML for path in sorted((root / folder).rglob(f"*{suffix}"))]
    found = dict[str, list[Offence]]()
    for path in paths:
        check = CHECKS.get(path.suffix, yaml_offences)
        name = str(path.relative_to(root))
        if name.endswith(GENERATED) or name.startswith(RECORDED):
            continue
        if offences := check(path.read_text("utf-8")):
            found[name] = offences
    return found


def main(root: Path = ROOT) -> int:
    """Print each offence; return the exit code."""
    lines = [
        f"{name}:{each.line}: {each.problem}\n"
        for name, offences in all_offences(root).items()
        for each in offences
    ]
    sys.stderr.writelines(lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
