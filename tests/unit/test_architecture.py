"""Imports flow down, and each heavy library is imported in one kind of file only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpctrain"

ROOMS = {
    "errors": set(),
    "system": set(),
    "config": {"errors"},
    "task": set(),
    "events": {"errors"},
    "facts": set(),
    "run_documents": {"events"},
    "run_dir": {"errors", "config", "events", "run_documents"},
    "digest": {"events"},
    "tail": {"errors"},
    "following": {"digest", "events", "run_dir", "tail"},
    "data": {"errors", "config"},
    "comm": {"errors", "config"},
    "train": {"errors", "config", "comm", "data"},
    "frameworks": {"errors", "config", "comm", "data", "train", "task"},
    "checkpoint": {"errors", "config", "config_file", "comm", "data", "train", "run_dir", "events"},
    "monitor": {"errors", "config", "config_file", "comm", "train", "run_dir", "events", "launch"},
    "launch": {
        "errors",
        "config",
        "config_file",
        "comm",
        "train",
        "run_dir",
        "events",
        "facts",
        "resources",
        "monitor",
        "digest",
        "following",
    },
    "track": {"errors", "config", "comm", "train", "run_dir", "events", "facts", "report", "tail"},
    "report": {"errors", "config", "config_file", "run_dir", "events", "resources", "monitor", "digest"},
    "watch": {"errors", "run_dir", "digest", "following", "tail", "launch", "track", "report"},
}
"""What each room may import besides itself and ``system``; rooms that are not named (the command line, build): all."""

HEAVY = {
    "torch": lambda path: path.name.startswith("torch"),
    "tensorflow": lambda path: path.name.startswith("tensorflow"),
    "keras": lambda path: path.name.startswith("tensorflow"),
    "horovod": lambda path: path.parent.name in ("comm", "bench"),
}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports at run time, wherever the statement stands; not those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            if node.module == "hpctrain":
                yield from (f"hpctrain.{alias.name}" for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_flow_down(room: str) -> None:
    allowed = ROOMS[room] | {room, "system"} | ({"run_documents"} if "run_dir" in ROOMS[room] else set())
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        if room_of(path) == room and path.name != "commands.py"
        for module in imports(path)
        if module.startswith("hpctrain.") and module.split(".")[1] not in allowed | {"__version__"}
    ]
    assert not wrong


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_files(library: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        for module in imports(path)
        if module.split(".")[0] == library and not HEAVY[library](path)
    ]
    assert not wrong


def test_nothing_is_unpickled() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        for module in imports(path)
        if module.split(".")[0] in unsafe
    ]
    assert not wrong


def test_our_own_python_processes_have_one_way_to_start() -> None:
    """-m and -c alone would run what lies in the current folder."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path
        not in (PACKAGE / "system" / "python.py", PACKAGE / "__init__.py")  # which looks at its own command line
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.List, ast.Tuple))
        and {"-m", "-c"} & {part.value for part in node.elts if isinstance(part, ast.Constant)}
    ]
    assert not wrong


PROTOCOLS = {"doctor/link.py"}
"""Programs that print what another process of ours reads."""
OWN_OUTPUT = {"launch/attempt.py", "monitor/session.py"}
"""Those that pass on, as they come, what the launcher and the monitor's agent of the very run say."""


def test_everything_that_is_printed_goes_through_one_function() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path.relative_to(PACKAGE).as_posix() not in PROTOCOLS | OWN_OUTPUT | {"system/foreign_text.py"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert not wrong


READERS = (
    *("config_file", "run_dir", "tail", "following", "events", "report/", "watch/", "track/", "launch/last_words"),
    *("launch/live_lock", "launch/postmortem", "launch/slurm/logs", "launch/slurm/status", "launch/slurm/watching"),
    *("launch/slurm/ending", "launch/slurm/profile", "monitor/deaths", "monitor/exclude"),
)
"""Files whose readings of run folders and run files go through system/safe_read."""


def test_run_folders_are_read_with_bounds() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in FILES
        if path.relative_to(PACKAGE).as_posix().startswith(READERS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and reads(node)
    ]
    assert not wrong


def reads(call: ast.Call) -> bool:
    """Whether a call opens a file for reading by itself."""
    name = ast.unparse(call.func)
    if name == "open":
        return len(call.args) < 2 or ast.unparse(call.args[1]) in ("'r'", "'rb'")
    if name == "os.open":
        return "O_RDONLY" in ast.unparse(call)
    return name.endswith((".read_text", ".read_bytes", "json.load", "json.loads")) or ast.unparse(call).startswith(
        "np.load(run"
    )


def test_the_command_line_loads_no_framework_and_no_mpi() -> None:
    program = (
        "import sys, importlib; from hpctrain.cli import COMMANDS\n"
        "for command in COMMANDS.values(): importlib.import_module(command.module)\n"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py', 'matplotlib', 'mlflow', 'pyarrow'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
