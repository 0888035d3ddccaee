"""Front doors of rooms tell what is behind them, and cost nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpctrain"
DOORS = sorted(path.relative_to(PACKAGE).parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
LIGHT = [
    "hpctrain.data.formats.sources",
    "hpctrain.data.pipeline",
    "hpctrain.data.stream",
    "hpctrain.comm.world",
    "hpctrain.reduce.candidates",
    "hpctrain.train.loop",
    "hpctrain.train.metrics",
    "hpctrain.rank.session",
    "hpctrain.run.run_view",
    "hpctrain.backends.update",
    "hpctrain.tasks.tf_environment",
]
"""What every command may import: formats, frameworks and MPI are loaded when they are needed."""


@pytest.mark.parametrize("room", DOORS, ids=str)
def test_a_name_is_imported_from_the_file_that_defines_it(room):
    door = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(door)
    ours = [
        node.module for node in ast.walk(door) if isinstance(node, ast.ImportFrom) and "hpctrain" in str(node.module)
    ]
    assert not ours, "a second way to the same name"


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_loads_no_format_no_framework_and_no_mpi(module):
    heavy = "{'h5py', 'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'}"
    program = f"import sys, {module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
