"""Commands and run files that pages, examples, help texts and messages print."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted([*(ROOT / "examples").rglob("*.md"), *(ROOT / "slurm").rglob("*.md"), *(ROOT / "env").rglob("*.md")])
FILES = sorted(
    path
    for folder in ("examples", "slurm", "env")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in {".yaml", ".py", ".sh", ".sbatch", ".toml", ".def", ""}
)
MODULES = sorted((ROOT / "hpctrain").rglob("*.py"))
PLACEHOLDERS = {"N": "2", "S": "2", "X": "2", "[WORD]": "lr"}
"""What a reader fills in, and what may stand there. X: what a message fills in."""
NAMES = "|".join(sorted(COMMANDS, key=len, reverse=True))
COMMAND = re.compile(rf"\bhpctrain (?:{NAMES})(?= |$)")


@dataclass(frozen=True)
class Printed:
    """A command as it is printed."""

    place: str
    """File and line."""
    text: str
    is_mention: bool = True
    """It stands in a sentence, and may lack what it needs to run."""

    def lines(self) -> list[list[str]]:
        """The words after ``hpctrain``; several commands if it lists alternatives, as ``ckpt ls|verify`` does."""
        if listed := re.match(r"hpctrain ((?:\w+ )?)(\w+(?: ?\| ?\w+)+)", self.text):
            return [[*listed[1].split(), one] for one in re.split(r" ?\| ?", listed[2])]
        filled = re.sub(r'"\$\(.*\)"', "2", re.sub(r'"\$\{\w+\[@\]\}"', "", self.text))
        head = re.match(r"""(?:"[^"]*"|'[^']*'|[^`;&|<>()\n\\"'])*""", filled)
        words = shlex.split(head[0] if head else "")[1:]
        words = [PLACEHOLDERS.get(word, word) for word in words if word != "..."]
        return [spoken(words) if self.is_mention else words]


def spoken(words: list[str]) -> list[str]:
    """The words of a command in a sentence, without the rest of the sentence."""
    options = [at for at, word in enumerate(words) if word.startswith("-")]

    def belongs(at: int) -> bool:
        has_parts = at == 1 and words[0] in ("ckpt", "data", "bench", "track")
        return has_parts or at in options or at - 1 in options or bool(re.search(r"\w[./|=]\w|[A-Z0-9]", words[at]))

    end = next((at for at in range(1, len(words)) if not belongs(at)), len(words))
    end = next((at + 1 for at in range(end) if words[at][-1] in ":,."), end)
    return [word.rstrip(":,.") for word in words[:end]]


def place(path: Path, text: str, position: int) -> str:
    """File and line."""
    return f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, position) + 1}"


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Language ("" if none is named), content and position of each block of a page."""
    for found in re.finditer(
        r"^```(\w*).*?\n(.*?)^```|(?<=\n\n)((?:(?:    [^\n]*)?\n)*    [^\n]*\n)", text, re.S | re.M
    ):
        yield found[1] or "", found[2] or textwrap.dedent(found[3] or ""), found.start()


def prose(text: str) -> str:
    """The page with its fenced blocks made blank."""
    return re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), text, flags=re.S | re.M)


def of_pages() -> Iterator[Printed]:
    """Each command in a block, and each in inline code."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for language, content, start in blocks(text):
            for line in content.replace("\\\n", "").splitlines() if language != "python" else ():
                if found := COMMAND.search(plain := without_comment(line)):
                    shown = "`" in line  # a list's item is taken for a block
                    yield Printed(place(path, text, start), plain[found.start() :], shown)
        for code in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose(text)):
            if found := COMMAND.search(words := " ".join(code[1].split())):
                yield Printed(place(path, prose(text), code.start()), words[found.start() :])


def programs_of_pages() -> dict[str, list[tuple[str, str]]]:
    """Place and content of each Python block, by page."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for language, content, start in blocks(text):
            if language == "python":
                found.setdefault(str(path.relative_to(ROOT)), []).append((place(path, text, start), content))
    return found


def write_wave() -> None:
    """Writes README's task and run file to the current folder."""
    found = {language: content for language, content, _ in blocks((ROOT / "README.md").read_text(encoding="utf-8"))}
    Path("wave.py").write_text(found["python"])
    Path("wave.yaml").write_text(found["yaml"])


def without_comment(line: str) -> str:
    """The line up to a comment of the shell."""
    return re.split(r"\s#\s", f" {line}", maxsplit=1)[0].strip()


def of_files() -> Iterator[Printed]:
    """Commands in comments and scripts."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for line in re.finditer(r"^.+$", text, re.M):
            for found in COMMAND.finditer(line[0]):
                yield Printed(place(path, text, line.start()), without_comment(line[0][found.start() :]))


def of_messages() -> Iterator[Printed]:
    """Commands in the strings of the package: fixes, epilogs, docstrings. What is filled in is ``X``."""
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                text = node.value
            for found in COMMAND.finditer(text):
                yield Printed(f"{path.relative_to(ROOT)}:{node.lineno}", text[found.start() :])
