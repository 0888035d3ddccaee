"""``explain`` over the kept corpus of failed runs: no answer is wrong, and the page shows what it says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.failures import corpus, judging
from benchmarks.failures.cases import CASES
from benchmarks.failures.judging import Answer

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, unpacked."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus.unpack(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Answer]:
    """What ``explain`` says of each run."""
    return [judging.ask(case, folder) for case in CASES]


def test_no_run_is_explained_wrongly(answers):
    wrong = [f"{each.case.label}/{each.case.name}: {each.wrong}\n{each.text}" for each in answers if each.wrong]
    assert not wrong, "\n".join(wrong)
    assert len(answers) >= 120


def test_the_page_shows_the_matrix_and_the_counts(answers):
    page = PAGE.read_text(encoding="utf-8")
    assert judging.matrix(answers) in page
    assert judging.summary(answers) in page


def test_the_corpus_has_all_runs_and_nothing_of_a_machine(folder):
    assert {f"{case.label}/{case.name}" for case in CASES} == {
        str(path.relative_to(folder)) for path in folder.glob("*/*")
    }
    elsewhere = re.compile(r"/(tmp|work|root)/[\w-]+/")
    found = {
        match[0] for path in folder.rglob("*.*") if path.is_file() for match in elsewhere.finditer(path.read_text())
    }
    assert not found


def test_an_answer_is_wrong_in_its_code_its_rank_or_its_words(answers):
    right = next(each for each in answers if each.case.name == "killed-torch-1-7")
    assert right.wrong == []
    other = dataclasses.replace(right.case, label="hang", rank=0, says=("deadlock",))
    assert dataclasses.replace(right, case=other).wrong == [
        "killed instead of hang", "names rank 1 instead of 0", "does not say 'deadlock'",
    ]  # fmt: skip
