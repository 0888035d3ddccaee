"""What rooms offer to others at their front doors: it is there, and costs nothing before it is used."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = ("comm", "reduce", "train", "frameworks", "frameworks.torch", "frameworks.tensorflow", "rank")


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_front_door_names_is_defined_behind_it(room: str) -> None:
    door = importlib.import_module(f"hpctrain.{room}")
    modules = {module.name for module in pkgutil.iter_modules(door.__path__)}
    assert not modules & set(door.__all__), "importing the module would take the name's place"
    for name, module in vars(door).get("_MODULES", {}).items():
        source = (Path(door.__path__[0]) / f"{module}.py").read_text()
        assert name in defined(ast.parse(source)), f"{module} defines no {name}"
    assert set(vars(door).get("_MODULES", door.__all__)) == set(door.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


def defined(tree: ast.Module) -> set[str]:
    """Names that a module's own statements give."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return {node.name for node in tree.body if isinstance(node, kinds)} | {ast.unparse(each) for each in targets}


def test_a_name_is_loaded_when_it_is_used() -> None:
    from hpctrain.reduce import Candidate
    from hpctrain.train import Phase

    assert (Candidate("none").name, Phase.DATA) == ("none", 0)


def test_front_doors_load_no_framework_and_no_mpi() -> None:
    rooms = ", ".join(f"hpctrain.{room}" for room in ROOMS)
    program = f"import sys, {rooms}; print({{'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
