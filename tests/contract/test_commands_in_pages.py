"""Tests of command lines in README.md and the pages.

Each `dlion` command line in code blocks and sentences has an existing command and existing options.
Each `make` target exists.

Left out: running the lines; tests/local/test_documented_commands.py runs those of the tutorial.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from dlion_cli.command_line import dlion

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "bash", "console"}
INVOCATION = re.compile(r"(?:^|[;|] |do |\$\()\s*(dlion [^;|]*)")


SPAN = re.compile(r"`(dlion [^`|;]+)")
ANY_COMMAND = "dlion COMMAND --help"
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def block_texts(page: Path) -> str:
    """The shell code blocks of the page, with continued lines joined."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return "\n".join(text for kind, text in blocks if kind in SHELL).replace("\\\n", " ")


def sentences(page: Path) -> str:
    """The page without its code blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def command_lines(page: Path) -> list[str]:
    """The `dlion` commands in the page's code blocks and sentences."""
    in_blocks = [
        found for line in block_texts(page).splitlines() for found in INVOCATION.findall(line)
    ]
    in_sentences = [" ".join(each.split()) for each in SPAN.findall(sentences(page))]
    return [*in_blocks, *(each for each in in_sentences if each != ANY_COMMAND)]


def problems(line: str) -> list[str]:
    """Return the parts of the command line that do not exist."""
    _, *words = shlex.split(line, comments=True)
    command: click.Command = dlion
    context = click.Context(dlion)
    options = {name for each in dlion.params for name in (*each.opts, *each.secondary_opts)}
    found = []
    for word in words:
        if word.startswith("-") and word != "-":
            if word.partition("=")[0] not in options | {"--help", "-h"}:
                found.append(f"{line}: {command.name} has no {word}")
        elif isinstance(command, click.Group):
            child = command.get_command(context, word)
            if child is None:
                return [f"{line}: there is no command {word}"]
            command = child
            options |= {
                name for each in child.params for name in (*each.opts, *each.secondary_opts)
            }
    return found


def test_the_pages_have_command_lines() -> None:
    assert sum(len(command_lines(page)) for page in PAGES) > 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_line_is_valid(page: Path) -> None:
    assert [each for line in command_lines(page) for each in problems(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_make_target_exists(page: Path) -> None:
    spans = re.findall(r"`(make [^`]+)`", sentences(page))
    named = TARGET.findall("\n".join([block_texts(page), *spans]))
    assert [each for each in named if each not in TARGETS] == []


@pytest.mark.parametrize(
    "line", ["dlion rum job.yaml", "dlion run job.yaml --unprivilegde", "dlion trust list"]
)
def test_an_invalid_command_line_is_found(line: str) -> None:
    assert len(problems(line)) == 1
