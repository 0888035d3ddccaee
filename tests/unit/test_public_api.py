"""What ``import hpctrain`` offers, and that docs and examples make do with it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpctrain

ROOT = Path(__file__).parents[2]
NAMES = [name for name in hpctrain.__all__ if name != "__version__"]
CALLBACKS = {f"callbacks.{library}.SaveOnStop" for library in ("transformers", "lightning", "accelerate")} | {
    "callbacks.transformers.newest_checkpoint"
}
"""Public names in modules of their own, since they need libraries that may be missing."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))


def test_the_names_are_those_of_the_stub():
    tree = ast.parse((ROOT / "hpctrain/__init__.pyi").read_text(encoding="utf-8"))
    imports = [(node.module, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    renamed = {alias.asname for _, alias in imports if alias.asname != alias.name}
    assigned = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)}
    assert assigned == {f"{str(name).removeprefix('_')} = {name}" for name in renamed}
    stub = {str(alias.asname).removeprefix("_"): (module, alias.name) for module, alias in imports}
    assert stub == hpctrain._find_homes() and len(stub) == len(imports)
    assert set(NAMES) == set(stub)
    assert set(dir(hpctrain)) == set(hpctrain.__all__)


@pytest.mark.slow
def test_every_name_is_there_whatever_else_is_imported_and_docstrings_name_every_argument():
    """In a process of its own: the frameworks change the environment."""
    modules = sorted({module for module, _ in hpctrain._find_homes().values()})
    program = (
        f"import importlib, hpctrain\nfor module in {modules}: importlib.import_module(module)\n"
        "for name, (module, attribute) in hpctrain._find_homes().items():\n"
        "    assert getattr(hpctrain, name) is getattr(importlib.import_module(module), attribute), name\n"
        "import inspect, re\n"
        "for name in hpctrain.__all__:\n"
        "    thing = getattr(hpctrain, name)\n"
        "    if inspect.isfunction(thing):\n"
        "        told = re.findall(r'^ {4}(\\w+(?:, \\w+)*): ', inspect.getdoc(thing).partition('Args:')[2], re.M)\n"
        "        missing = set(inspect.signature(thing).parameters) - set(', '.join(told).split(', '))\n"
        "        print(*(f'{name}({one})' for one in missing))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_name_is_that_of_a_room():
    rooms = {path.stem for path in (ROOT / "hpctrain").iterdir()}
    assert set(NAMES) & rooms == set()


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'hpctrain' has no attribute 'Trainor'"):
        _ = hpctrain.Trainor  # type: ignore[attr-defined]


def test_importing_it_loads_nothing_else():
    program = "import sys; before = set(sys.modules); import hpctrain; dir(hpctrain)\n"
    program += "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - {'hpctrain'}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) <= set(sys.stdlib_module_names)


def sources() -> Iterator[tuple[str, str]]:
    """(place, Python) of every program and every code block."""
    for path in PROGRAMS:
        yield path.name, path.read_text(encoding="utf-8")
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            yield f"{page.name}, block {number}", block


def used(source: str) -> Iterator[str]:
    """What a program takes from hpctrain: ``name``, or ``module.name`` of another module of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hpctrain."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hpctrain":
            below = (node.module or "").removeprefix("hpctrain").lstrip(".")
            yield from (f"{below}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hpctrain":
            yield node.attr


def test_docs_and_examples_use_public_names_only():
    found = [(place, name) for place, source in sources() for name in used(source)]
    assert {name for _, name in found} >= {"TorchTask", "KerasTask", "CheckpointStore", "connect"}
    public = {*hpctrain.__all__, *CALLBACKS}
    assert [(place, name) for place, name in found if name not in public] == []
