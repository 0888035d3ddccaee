"""The map of the house: which room may know which, imports without circles, heavy libraries in their own files."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
import typing
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from hpctrain.config import combinations, sections

PACKAGE = Path(__file__).parents[2] / "hpctrain"

ROOMS: dict[str, str] = {
    "errors": "",
    "system": "errors",
    "config": "errors system",
    "comm": "errors",
    "run": "errors system config",
    "data": "errors system config",
    "reduce": "errors system config comm",
    "train": "errors system config comm run data",
    "tasks": "errors system comm train",
    "backends": "errors system config comm run data reduce train tasks monitor",
    "checkpoint": "errors system config comm run train backends",
    "monitor": "errors system config comm run train",
    "track": "errors system config run train",
    "rank": "errors system config comm run data reduce train tasks backends checkpoint monitor track",
    "programs": "errors system config comm run backends monitor",
    "callbacks": "errors programs",
    "launch": "errors system config comm run",
    "report": "errors run system",
    "watch": "errors system run launch",
    "doctor": "errors system config comm run reduce backends track launch",
    "horovod_wheel": "errors system",
    "bench": "errors system config comm run data reduce train tasks backends checkpoint launch report",
    "commands": "errors system config comm run data train tasks backends checkpoint track rank "
    "launch report watch doctor bench horovod_wheel",
    "cli": "errors system commands",
    "__main__": "system cli",
    "__init__": "",
}
"""What each room imports besides itself, imports for type checkers and by name included. Who imports less, loses the
permission."""

TOKENS: dict[str, int] = {
    "errors": 1076,
    "system": 14350,
    "config": 11736,
    "comm": 6090,
    "run": 26259,
    "data": 38139,
    "reduce": 11444,
    "train": 14791,
    "tasks": 7772,
    "backends": 127689,
    "checkpoint": 52360,
    "monitor": 32321,
    "track": 6576,
    "rank": 15623,
    "programs": 4864,
    "launch": 50675,
    "report": 11597,
    "callbacks": 928,
    "watch": 4757,
    "doctor": 4490,
    "horovod_wheel": 4152,
    "bench": 8499,
    "commands": 17088,
    "cli": 1039,
    "__main__": 159,
    "__init__": 236,
}
"""Most tokens of each room: what must be read, whatever the lines. Who needs more raises the number in the commit that
needs it, and says in its message what was bought; who removes some lowers it."""

ADAPTERS = {Path("data/formats/torch_dataset.py"): "torch", Path("data/formats/tf_dataset.py"): "tensorflow"}
"""They import the framework whose datasets they read, and are imported for those."""
HEAVY = {
    "torch": lambda path: (
        path.parts[:2] == ("backends", "torch") or is_task(path, "torch") or ADAPTERS.get(path) == "torch"
    ),
    "tensorflow": lambda path: (
        path.parts[:2] == ("backends", "tensorflow")
        or is_task(path, "tensorflow")
        or ADAPTERS.get(path) == "tensorflow"
    ),
    "keras": lambda path: (
        path.parts[:2] in {("backends", "keras"), ("backends", "tensorflow")}
        or path.parts[:3] == ("backends", "torch", "keras")
        or is_task(path, "tensorflow")
    ),
    "horovod": lambda path: "reduce" in path.parts,
    **dict.fromkeys(("transformers", "lightning", "accelerate"), lambda path: path.parts[0] == "callbacks"),
}
"""Which files, by their path in the package, may import a library that is slow to load or may be missing."""


def is_task(path: Path, framework: str) -> bool:
    """Whether this is a task that comes with the package, or the beginning of one."""
    return path.parts[0] == "tasks" and path.name.startswith(framework)


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


PRELOADED = PACKAGE / "launch" / "forks" / "forking.py"
"""Names what the process that ranks are forked from imports: it becomes the ranks."""


def named(path: Path) -> Iterator[str]:
    """Modules of ours that a file names in strings, to import them by name: in full, or up to a dot in an f-string.

    Programs that it starts in other processes (``python.module``) are not meant.
    """
    started = {
        id(word)
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "python.module"
        for word in node.args
    }
    for node in nodes(path):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) in started or node.lineno in docstrings(path):
            continue
        for name, dot in re.findall(r"\b(hpctrain(?:\.\w+)+)(\.?)", node.value):
            if name in FILES and (dot or FILES[name].name != "__init__.py"):
                yield name


def test_every_room_is_on_the_map():
    assert {room_of(module) for module in FILES} == set(ROOMS)


def test_contributors_are_told_what_every_room_owns():
    table = re.findall(r"(?m)^\| (`.*?`) \|", (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    told = {room for row in table for room in re.findall(r"`(\w+)/", row)}
    assert {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")} - told == set()


def test_contributors_find_the_files_that_are_named():
    """A bare file name is in the folder of the path before it."""
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folder, missing = PACKAGE, []
    for name in re.findall(r"`([\w/]+\.py)`", page):
        places = [root / name for root in (PACKAGE, PACKAGE.parent, folder)]
        found = next((place for place in places if place.exists()), None)
        missing += [] if found else [name]
        folder = found.parent if found else folder
    assert missing == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_map_says(room):
    found = {
        room_of(other): f"{module} imports {other}"
        for module, path in FILES.items()
        if room_of(module) == room
        for other in {*ours(path), *(named(path) if path != PRELOADED else ())}
        if other != "hpctrain"  # the version
    }
    found.pop(room, None)
    allowed = set(ROOMS[room].split())
    assert [sentence for other, sentence in found.items() if other not in allowed] == []
    assert allowed - set(found) == set(), "permissions that nobody uses"


@functools.cache
def docstrings(path: Path) -> set[int]:
    """Lines of docstrings, also of fields."""
    return {
        line
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@functools.cache
def weight(path: Path) -> int:
    """Tokens of a file: what must be read of it, without comments, docstrings (of fields too) and layout."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(one.type not in LAYOUT and one.start[0] not in docstrings(path) for one in tokens)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget_of_tokens(room):
    count = sum(weight(path) for module, path in FILES.items() if room_of(module) == room)
    assert count <= TOKENS[room], f"{room}/ has {count} tokens: see TOKENS, which says how to raise its budget"


ENGINES = {
    **dict.fromkeys(("batch_systems", "batch_jobs", "runners"), 1300),
    "hosts": 1900,
}
"""Most tokens of each engine but Slurm, which is one file or folder of ``launch/engines``."""
SHARED = ("jobs", "scheduler", "schedulers", "unread", "run_encoded")
"""Files there that engines share."""


def test_an_engine_is_in_one_place_and_small():
    folder = PACKAGE / "launch" / "engines"
    places = {name: [*(folder / name).rglob("*.py"), *folder.glob(f"{name}.py")] for name in (*ENGINES, *SHARED)}
    counts = {name: sum(map(weight, files)) for name, files in places.items()}
    assert [name for name, most in ENGINES.items() if not 0 < counts[name] <= most] == []
    assert sum(counts.values()) + sum(map(weight, (PACKAGE / "launch" / "runners").glob("*.py"))) <= 17300


def test_commands_about_jobs_know_no_engine_by_name():
    words = {word.value for word in nodes(PACKAGE / "commands" / "jobs.py") if isinstance(word, ast.Constant)}
    assert words & {*typing.get_args(sections.Engine)} == set()


def test_one_name_is_one_file_and_one_class():
    """Commands, benchmarks and callbacks are named by what people type, events and keys by what is in files."""
    own = {module: path for module, path in FILES.items() if room_of(module) not in ("commands", "bench", "callbacks")}
    files = Counter(path.stem for path in own.values() if path.name != "__init__.py")
    classes = Counter(
        node.name
        for module, path in own.items()
        if module not in ("hpctrain.run.events", "hpctrain.config.sections")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (*files.items(), *classes.items()) if count > 1] == []


def test_the_map_has_no_circle():
    TopologicalSorter({room: set(others.split()) for room, others in ROOMS.items()}).prepare()


def test_what_other_rooms_import_is_told_at_the_front_door():
    untold = {
        f"{door} does not name {name}, which {module} imports"
        for module, path in FILES.items()
        for other in ours(path)
        if "." in other and room_of(other) not in (room_of(module), other.rpartition(".")[2])
        for door, _, name in [other.rpartition(".")]
        if not re.search(rf"\b{name}\b", FILES[door].read_text(encoding="utf-8"))
    }
    assert not untold


def test_no_two_files_import_each_other():
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


def test_every_file_of_refusals_is_in_the_table():
    rows = [getattr(importlib.import_module(module), "ROWS", {}) for module in FILES if ".refusals." in module]
    assert (
        len(rows) > 1
        and [row.features for row in combinations.TABLE if not any(row.features in one for one in rows)] == []
    )
    assert sum(map(len, rows)) == len(combinations.TABLE)


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_files(library):
    wrong = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported(path)
        if other.split(".")[0] == library and not HEAVY[library](path.relative_to(PACKAGE))
    ]
    assert not wrong


def test_nothing_is_unpickled():
    unsafe = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
    wrong = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported(path)
        if other.split(".")[0] in unsafe
    ]
    assert not wrong


def test_our_own_python_processes_have_one_way_to_start():
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


PROTOCOLS = {"doctor/mpi_ranks.py"}
"""Programs that print what another process of ours reads."""
OWN_OUTPUT = {"launch/attempt.py", "monitor/rank_monitor.py"}
"""Those that pass on, as they come, what the launcher and the monitor's agent of the very run say."""


def test_everything_that_is_printed_goes_through_one_function():
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
    *("minimum_version", "check_hostname", "verify_mode"),
    # how callbacks of the Hugging Face Trainer tell it what to do
    *("should_save", "should_training_stop", "load_best_model_at_end", "save_total_limit"),
    *("epilog", "overrides", "program", "extraction_filter", "_devices", "_timeout"),
    *("_value", "_shape", "keras_variable"),  # Keras variables get the tensors of a plan
    "unsharded_accumulated_grad",  # of FSDP2, which has no other way to say that a gradient is zero so far
    "post_backward",  # of FSDP2 before PyTorch 2.13, which has no setting to sum gradients of unused parameters
    "check_custom_op_aliasing",  # of torch's compiler, whose check takes no subclasses of Tensor
    "add_param_group",  # of torch's optimizers, which take no parameters once they are sharded
    "found_inf",  # of torch's optimizers, which read it as GradScaler sets it
    *("group_name", "global_ranks_in_group"),
    *("last_backward", "batch_norm", "_moments", "embeddings", "update_step", "joint"),
    *(
        "__class__",
        "__kwdefaults__",
        "allow_tf32",
        "benchmark",
        "constraint",
        "built",
        "learning_rate",
        "overwrite_with_gradient",
    ),
    *("stage", "future", "failure", "structure", "done", "summed"),
}
"""Attributes of libraries' objects; one that users set, too; and those of records that one file makes for itself."""


def test_nobody_sets_an_attribute_of_another_object():
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


WIRING = {"__init__", "bench", "commands", "config", "doctor", "launch", "rank"}
"""Rooms that read a whole run file to start something. Others get a section of it, or plain values."""


def test_rooms_get_their_section_of_the_run_file():
    wrong = {
        module_of(path)
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == "hpctrain.config.sections"
        and "Config" in {alias.name for alias in node.names}
        and room_of(module_of(path)) not in WIRING
    }
    assert wrong == {"hpctrain.run.resolve_run"}  # which finds a run file for the commands


READERS = (
    *("config/loading", "run/", "report/", "watch/", "track/", "launch/postmortem"),
    *(f"launch/engines/{name}" for name in ("status", "jobs", "slurm/profile")),
    *("commands/jobs", "commands/report", "commands/track"),
)
"""Files whose readings of run folders and run files go through system/safe_read."""


def test_run_folders_are_read_with_bounds():
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


def test_the_files_of_a_run_folder_are_known_in_its_room_alone():
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


def test_the_command_line_loads_no_framework_and_no_mpi():
    program = (
        "import sys, importlib; from hpctrain.cli import COMMANDS\n"
        "for command in COMMANDS.values(): importlib.import_module(command.module)\n"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py', 'matplotlib', 'mlflow', 'pyarrow'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
