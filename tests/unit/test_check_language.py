"""Test that tools/check_language.py finds each kind of offence.

Left out: this repository (`make check`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_language", ROOT / "tools" / "check_language.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load()
LONG = " ".join(["word"] * 31) + "."


def page_problems(page: str) -> list[tuple[int, str]]:
    return [tuple(offence) for offence in TOOL.page_offences(page)]


def source_problems(source: str) -> list[tuple[int, str]]:
    return [tuple(offence) for offence in TOOL.source_offences(source)]


@pytest.mark.parametrize(
    "word",
    ["told", "Whoever", "in vain", "thereof", "for ever", "says", "tell", "tells", "of chance"],
)
def test_a_page_has_no_banned_word(word: str) -> None:
    assert page_problems(f"# Title\n\nIt is {word} here.\n") == [(3, f"banned: {word}")]


def test_a_banned_phrase_may_be_broken_over_lines() -> None:
    assert page_problems("It waits in\nvain for it.\n") == [(1, "banned: in vain")]


def test_headings_and_tables_are_checked_for_words() -> None:
    page = "# What is said\n\n| a | b |\n|---|---|\n| told | x |\n"
    assert page_problems(page) == [(1, "banned: said"), (5, "banned: told")]


def test_parts_of_words_and_code_are_not_offences() -> None:
    page = "Essays untold.\n\n```\nsaid\n```\n\nThe field `told` of [it](told.md).\n"
    assert page_problems(page) == []


def test_lines_after_code_keep_their_numbers() -> None:
    assert page_problems("```\na\nb\n```\n\n`a\nb` it is told\n") == [(7, "banned: told")]


def test_a_sentence_of_a_page_has_at_most_30_words() -> None:
    short = "A short one. " * 5
    assert page_problems(f"{short}\n\n{LONG}\n") == [(3, "sentence of 31 words")]
    assert page_problems(f"{short}\n\n{LONG.replace('word ', '', 1)}\n") == []


def test_list_items_are_sentences_of_their_own() -> None:
    item = "- " + " ".join(["word"] * 12)
    assert page_problems("\n".join([item] * 3)) == []


def test_the_mean_sentence_of_a_page_has_at_most_16_words() -> None:
    sentence = " ".join(["word"] * 17) + "."
    assert page_problems(f"{sentence}\n{sentence}\n") == [(1, "mean sentence of 17.0 words")]


def test_docstrings_and_comments_have_no_banned_word() -> None:
    source = (
        '"""Says it."""\n\nLIMIT = 1\n"""What is\nsaid."""\n'
        "# told\ndef run():\n    'anew'\n    return 'told'\n"
    )
    assert sorted(source_problems(source)) == [
        (1, "banned: Says"),
        (5, "banned: said"),
        (6, "banned: told"),
        (8, "banned: anew"),
    ]


@pytest.mark.parametrize("text", ["Of the site.", "Those of the job.", "That worker's rank."])
def test_a_docstring_names_what_it_describes(text: str) -> None:
    assert source_problems(f'X = 1\n"""{text}"""\n') == [(2, "docstring without a subject")]
    assert source_problems(f'X = 1\n"""Offers {text}"""\n') == []
    assert source_problems(f'X = "{text}"\n') == []


@pytest.mark.parametrize(
    "name",
    ["told", "as_told", "ToldOnce", "_tell", "MOST_PEERS", "LEAST_S", "_seen", "_least_s"],
)
def test_identifiers_have_no_banned_part(name: str) -> None:
    assert source_problems(f"{name} = 1\n") == [(1, f"identifier {name}")]


@pytest.mark.parametrize("name", ["untold", "almost_all", "MAX_PEERS", "HTTPServer"])
def test_other_identifiers_pass(name: str) -> None:
    assert source_problems(f"{name} = 1\n") == []


def test_each_offence_of_a_tree_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("docs", "worker", "helm"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text("Plain.\n")
    (tmp_path / "docs" / "page.md").write_text("It is told.\n")
    (tmp_path / "worker" / "a_pb2.py").write_text("told = 1\n")
    (tmp_path / "worker" / "a.py").write_text("told = 1\n")
    (tmp_path / "helm" / "a.yaml").write_text("a: it holds\n# whom\n")
    (tmp_path / "helm" / "b.tpl").write_text('{{ fail "seen" }}\n')
    assert TOOL.main(tmp_path) == 1
    assert capsys.readouterr().err == (
        "docs/page.md:1: banned: told\nworker/a.py:1: identifier told\n"
        "helm/a.yaml:2: banned: whom\nhelm/b.tpl:1: banned: seen\n"
    )
