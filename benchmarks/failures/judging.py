"""Asks ``explain`` about each run of a corpus, and compares its answers with what was done to the runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.failures.cases import CODES, Case
from hpctrain.errors import Code
from hpctrain.report.explain import Explanation, explain, newest_failure
from hpctrain.run.run_view import RunView


@dataclass(frozen=True)
class Answer:
    """What ``explain`` says of a run."""

    case: Case
    said: Explanation
    rank: int | None
    """The rank that it names first."""

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.said.title}. {self.said.text}"

    @property
    def wrong(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        case = self.case
        found = [] if self.said.cause in case.right else [f"{self.said.cause} instead of {' or '.join(case.right)}"]
        if case.named is not None and self.rank != case.named:
            found.append(f"names rank {self.rank} instead of {case.named}")
        return found + [f"does not say {word!r}" for word in case.says if word.lower() not in self.text.lower()]


def ask(case: Case, folder: Path) -> Answer:
    """The answer about one run below a corpus's folder."""
    history = RunView(folder / case.label / case.name).history()
    failure = newest_failure(history)
    return Answer(case, explain(history, history.run.state(time.time())), failure.rank if failure else None)


def matrix(answers: Sequence[Answer]) -> str:
    """The confusion matrix as a table of Markdown: classes in rows, codes in columns."""
    counts = Counter((answer.case.label, answer.said.cause) for answer in answers)
    codes = [code for code in Code if any(code == each for _, each in counts)]
    lines = [
        "| class | runs | " + " | ".join(f"`{code}`" for code in codes) + " |",
        "|---|---" + "|---" * len(codes) + "|",
    ]
    for label in CODES:
        runs = sum(count for (each, _), count in counts.items() if each == label)
        row = [str(counts[label, code] or "") for code in codes]
        lines += [f"| {label} | {runs} | {' | '.join(row)} |"] if runs else []
    return "\n".join(lines)


def summary(answers: Sequence[Answer]) -> str:
    """The counts in one line."""
    named = [answer for answer in answers if answer.case.named is not None]
    first = sum(answer.rank == answer.case.named for answer in named)
    wrong = sum(bool(answer.wrong) for answer in answers)
    return f"{len(answers)} runs, {wrong} wrong answers; the failed rank is named first in {first} of {len(named)}."
