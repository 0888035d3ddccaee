"""The map of the house: which room may know which, imports without circles, heavy libraries in their own files."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpctrain"

ROOMS: dict[str, str] = {
    "errors": "",
    "system": "errors",
    "config": "errors system",
    "comm": "errors",
    "run": "errors system config",
    "data": "errors system",
    "reduce": "errors system config comm",
    "train": "errors config comm run data",
    "parallel": "errors system config comm reduce train",
    "tasks": "errors system comm train parallel",
    "frameworks": "errors config comm data reduce parallel train tasks",
    "checkpoint": "errors system config comm run data train tasks frameworks",
    "monitor": "errors system config comm run train",
    "track": "errors system run train",
    "rank": "errors system config comm run data reduce train parallel tasks frameworks checkpoint monitor track",
    "registry": "errors config comm run data train tasks checkpoint track rank report",
    "launch": "errors system config comm run",
    "report": "errors run",
    "watch": "errors system run track launch",
    "doctor": "errors system config comm run reduce launch",
    "horovod_wheel": "errors system",
    "bench": "errors system config comm run data reduce train tasks parallel frameworks checkpoint monitor launch "
    "report",
    "commands": "errors system config comm run data train parallel tasks frameworks checkpoint track rank registry "
    "bench launch report watch doctor horovod_wheel cli",
    "cli": "errors system config",
    "__main__": "system cli",
    "__init__": "errors config comm run data reduce train tasks parallel frameworks checkpoint monitor track rank",
}
"""What each room imports besides itself, imports for type checkers included. Who imports less, loses the permission."""

HEAVY = {
    "torch": lambda path: any(part.startswith("torch") for part in path.parts),
    "tensorflow": lambda path: any(part.startswith("tensorflow") for part in path.parts),
    "keras": lambda path: any(part.startswith("tensorflow") for part in path.parts),
    "horovod": lambda path: path.parts[0] in ("reduce", "bench"),
}
"""Which files, by their path in the package, may import a library that is slow to load or may be missing."""


def module_of(path: Path) -> str:
    parts = ("hpctrain", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever the statement stands and whoever it is for."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports name their module in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def ours(path: Path) -> set[str]:
    return {module for module in imported(path) if module.split(".")[0] == "hpctrain"}


def test_every_room_is_on_the_map() -> None:
    assert {room_of(module) for module in FILES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_map_says(room: str) -> None:
    found = {
        room_of(other): f"{module} imports {other}"
        for module, path in FILES.items()
        if room_of(module) == room
        for other in ours(path)
        if other != "hpctrain"  # the version
    }
    found.pop(room, None)
    allowed = set(ROOMS[room].split())
    assert [sentence for other, sentence in found.items() if other not in allowed] == []
    assert allowed - set(found) == set(), "permissions that nobody uses"


def test_the_map_has_no_circle() -> None:
    TopologicalSorter({room: set(others.split()) for room, others in ROOMS.items()}).prepare()


def test_what_other_rooms_import_is_told_at_the_front_door() -> None:
    untold = {
        f"{door} does not name {name}, which {module} imports"
        for module, path in FILES.items()
        for other in ours(path)
        if "." in other and room_of(other) not in (room_of(module), other.rpartition(".")[2])
        for door, _, name in [other.rpartition(".")]
        if not re.search(rf"\b{name}\b", FILES[door].read_text(encoding="utf-8"))
    }
    assert not untold


def test_no_two_files_import_each_other() -> None:
    """A package's front door may name the modules behind it: it loads them when they are asked for."""
    graph = {
        module: {other for other in ours(path) if other != module}
        for module, path in FILES.items()
        if path.name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_files(library: str) -> None:
    wrong = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported(path)
        if other.split(".")[0] == library and not HEAVY[library](path.relative_to(PACKAGE))
    ]
    assert not wrong


def test_nothing_is_unpickled() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
    wrong = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported(path)
        if other.split(".")[0] in unsafe
    ]
    assert not wrong


def test_our_own_python_processes_have_one_way_to_start() -> None:
    """-m and -c alone would run what lies in the current folder."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES.values()
        if path
        not in (PACKAGE / "system" / "python.py", PACKAGE / "__init__.py")  # which looks at its own command line
        for node in nodes(path)
        if isinstance(node, (ast.List, ast.Tuple))
        and {"-m", "-c"} & {part.value for part in node.elts if isinstance(part, ast.Constant)}
    ]
    assert not wrong


PROTOCOLS = {"doctor/link.py"}
"""Programs that print what another process of ours reads."""
OWN_OUTPUT = {"launch/attempt.py", "monitor/rank/session.py"}
"""Those that pass on, as they come, what the launcher and the monitor's agent of the very run say."""


def test_everything_that_is_printed_goes_through_one_function() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES.values()
        if path.relative_to(PACKAGE).as_posix() not in PROTOCOLS | OWN_OUTPUT | {"system/foreign_text.py"}
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert not wrong


SET_FROM_OUTSIDE = {
    *("grad", "data", "weight", "forward", "training", "deterministic", "atexit", "state", "no_wrap", "globals"),
    *("nargs", "epilog", "overrides", "program", "extraction_filter", "_devices", "_timeout"),
    *("last_backward", "batch_norm", "_moments", "embeddings", "update_step", "joint"),
    *("__class__", "constraint", "learning_rate", "overwrite_with_gradient"),
    *("stage", "future", "failure", "structure", "done", "summed"),
}
"""Attributes of libraries' objects; one that users set, too; and those of records that one file makes for itself."""


def test_nobody_sets_an_attribute_of_another_object() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES.values()
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) not in ("self", "cls", "ctx")  # ctx: how autograd functions of torch pass things on
        and node.attr not in SET_FROM_OUTSIDE
    ]
    assert not wrong


READERS = (
    *("config/loading", "run/", "report/", "watch/", "track/", "registry/", "launch/postmortem"),
    *(f"launch/engines/slurm/{name}" for name in ("status", "profile")),
    *("commands/slurm", "commands/report", "commands/watch", "commands/track"),
)
"""Files whose readings of run folders and run files go through system/safe_read."""


def test_run_folders_are_read_with_bounds() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in FILES.values()
        if path.relative_to(PACKAGE).as_posix().startswith(READERS)
        for node in nodes(path)
        if isinstance(node, ast.Call) and reads(node)
    ]
    assert not wrong


FILES_OF_A_RUN = ("events.jsonl", "run.json", "run.yaml", "run.lock", "live.json", "heat.npz", "STOP")
FOLDERS_OF_A_RUN = ("monitor", "ranks", "attempts", "checkpoints", "logs")


def test_the_files_of_a_run_folder_are_known_in_its_room_alone() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for module, path in FILES.items()
        if room_of(module) != "run"
        for node in nodes(path)
        if isinstance(node, ast.expr) and names_a_part(node)
    ]
    assert not wrong


def names_a_part(node: ast.expr) -> bool:
    """Whether an expression is the name of a run folder's file, or a path made with that of a folder in it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
        return str(node.right.value).partition("/")[0] in (*FOLDERS_OF_A_RUN, *FILES_OF_A_RUN)
    return isinstance(node, ast.Constant) and str(node.value).rpartition("/")[2] in FILES_OF_A_RUN


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
