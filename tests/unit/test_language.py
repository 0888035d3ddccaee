"""The lint of words that read translated: what it finds, and that it finds nothing in the places it checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.language import ROOT, findings, pages

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def paragraphs(text: str) -> Iterator[list[str]]:
    """Lines of each paragraph or list item, without code, tables and headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_prose = bool(line.strip()) and not line.startswith(("|", "#", "    "))
        if lines and (not is_prose or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield lines
            lines = []
        lines += [line] if is_prose else []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_pages_and_paragraphs_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert ["\n".join(lines) for lines in paragraphs(text) if len(lines) > 5] == []


@pytest.mark.parametrize("path", pages(), ids=lambda path: "/".join(path.parts[-3:]))
def test_every_page_and_module_is_clean(path):
    assert list(findings(path)) == []


def test_prose_of_a_page_is_checked_over_line_breaks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The run\ngoes\non. There is no limit.\n")
    assert list(findings(page)) == ["page.md:2: 'goes on': write continues, resumes"]


def test_comments_docstrings_and_messages_of_a_module_are_checked_and_names_are_not(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Nobody."""\nnobody = told = 1  # made anew\n'
        'message = f"is {nobody} or {told}"\nraise ValueError(f"{told} beside it")\n'
    )
    assert [line.partition(": write")[0] for line in findings(module)] == [
        "module.py:1: 'Nobody'",
        "module.py:2: 'anew'",
        "module.py:4: 'beside'",
    ]
