"""``python -m tests.language``: find words that read translated in pages, docstrings, comments and messages.

Part of ``make lint``. Each pattern has a plain replacement. A file in EXCEPTIONS may contain the phrases listed for it.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

BANNED = {
    r"\b(?:un)?told\b": "says, is covered in, detected",
    r"\btells? (?:of|how)\b": "describes, reports",
    r"\banew\b": "again",
    r"\bso many\b": "N",
    r"\bas many as\b": "the same number as, one per",
    r"\bnobody\b": "no one; or name the actor",
    r"\bwhom(?:so)?ever\b": "anyone",
    r"\bof (?:its|their|our|one's) own\b": "its own X, a separate X",
    r"\bone's own\b": "custom, your own",
    r"\bby what\b": "how, which",
    r"\binside of\b": "inside",
    r"\b(?:goes|go|going|went|gone) on\b": "continues, resumes",
    r"(?<!there\s)\bis no (?!longer|more|less|one|\w+er\b)": "is not a",
    r"\b(?:has|have|had) no part\b": "takes no part",
    r"\bshar(?:e|es|ed|ing) out\b": "partition, split",
    r"\bbeside\b": "compared with, next to",
    r"\bforet(?:ell|old)\w*": "predict",
    r"\bhand(?:s|ed|ing)? on\b": "pass on, send",
    r"\balike\b": "the same, equally",
    r"\b(?:any|every|some)body\b": "anyone, everyone; or name the actor",
    r"\bmid-run\b": "during the run",
    r"\bended well\b": "succeeded",
    r"\bin turns\b": "in turn, alternately",
    r"\bfor ever\b(?! longer)": "forever",
    r"\bstands? (?:in|there|on|for it)\b": "is in",
}
"""Regular expression, and what to write instead."""

EXCEPTIONS: dict[str, tuple[str, ...]] = {}
"""Phrases that are correct in their context, by file."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts to check: a whole page, or the comments and strings of a module."""
    if path.suffix != ".py":
        yield 1, path.read_text(encoding="utf-8")
        return
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            is_word = re.fullmatch(r"""\w*["'][\w./-]*["']""", token.string)
            if not is_word and (token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]):
                is_formatted = "f" in token.string.partition('"')[0].lower()
                yield token.start[0], re.sub(r"{[^{}]*}", "", token.string) if is_formatted else token.string


def findings(path: Path) -> Iterator[str]:
    """One line for each banned phrase in a file."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    for first, part in prose(path):
        for phrase in EXCEPTIONS.get(name, ()):
            part = part.replace(phrase, "")
        for pattern, instead in BANNED.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), part, re.IGNORECASE):
                line = first + part.count("\n", 0, match.start())
                yield f"{name}:{line}: '{' '.join(match.group().split())}': write {instead}"


def pages() -> list[Path]:
    """All files that are checked."""
    docs = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = [path for folder in ("hpctrain", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*docs, *code]


def main() -> int:
    found = [line for path in pages() for line in findings(path)]
    print(*found, sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
