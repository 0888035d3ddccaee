"""`make mutants`: small wrong changes to the modules that decide, each of which a test must detect.

A fixed seed draws them from all changes that cosmic-ray's operators can make to the modules of `modules.toml`, so two
runs on the same code are identical. Each mutant is tested by the tests of its module, in a copy of the checkout.
Mutants without any effect that a user could see are listed in `equivalent.toml`, each with its reason.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Mod_FloorDiv", "Pow_Mul")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_Gt", "Gt_Lt", "LtE_GtE", "GtE_LtE", "Is_IsNot", "IsNot_Is")),
    *(
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "AddNot",
        "NumberReplacer",
    ),
    *(
        "ReplaceUnaryOperator_USub_UAdd",
        "ReplaceUnaryOperator_Delete_Not",
    ),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
]
"""Short names of cosmic-ray's operators: one or two for each kind of mistake."""
PATIENCE_S = 120
"""Timeout of the tests of one mutant, which may loop forever; far above what they take."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: path of its file, relative to the checkout.
        code: source of the module with the change.
        change: lines removed and added, without context; it identifies the mutant in `equivalent.toml`.
    """

    module: str
    code: str
    change: str


def places(module: str) -> Iterator[tuple[str, str, int]]:
    """All possible changes of a module, as module, operator, occurrence, in an order that depends on its text alone."""
    nodes = list(ast_nodes(get_ast((ROOT / module).read_text(encoding="utf-8"))))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from ((module, name, occurrence) for occurrence in range(count))


def mutant(module: str, name: str, occurrence: int) -> Mutant:
    """Return the mutant for one place."""
    code = (ROOT / module).read_text(encoding="utf-8")
    changed = mutate_code(code, get_operator(f"core/{name}")(), occurrence)
    lines = list(difflib.unified_diff(code.splitlines(), changed.splitlines(), n=0, lineterm=""))[2:]
    return Mutant(module, changed, "\n".join(line for line in lines if not line.startswith("@@")))


def is_killed(mutant: Mutant, tests: list[str], copy: Path) -> bool:
    """Whether a test fails with the change, in a copy of the checkout that no one else uses meanwhile."""
    path = copy / mutant.module
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.code, encoding="utf-8")
    try:
        return not passes(tests, copy)
    finally:
        path.write_text(before, encoding="utf-8")


def passes(tests: list[str], copy: Path) -> bool:
    """Whether tests pass in a copy of the checkout; tests that time out do not."""
    # Without .pyc files: if a change kept a file's size and second of modification, the old one would be loaded.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    # Hypothesis' profile for CI draws the same examples in every run and has no deadlines.
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "ci", *tests]
    try:
        done = subprocess.run(words, cwd=copy, env=environment, timeout=PATIENCE_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2):
        sys.exit(f"pytest cannot run {' '.join(tests)}:\n{done.stdout.decode(errors='replace')}")
    return done.returncode == 0


def main() -> int:
    """Draw mutants, test them and print survivors; return 0 if enough were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a module's path")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    modules: dict[str, list[str]] = tomllib.loads((HERE / "modules.toml").read_text(encoding="utf-8"))
    equivalent = {
        (entry["module"], entry["change"].strip("\n"))
        for entry in tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8")).get("mutant", [])
    }
    everywhere = [place for module in modules for place in places(module)]
    places_drawn = random.Random(chosen.seed).sample(everywhere, min(chosen.count, len(everywhere)))
    drawn = [mutant(*place) for place in places_drawn if chosen.only in place[0]]
    same = [one for one in drawn if (one.module, one.change) in equivalent]
    real = [one for one in drawn if one not in same]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(chosen.at_once):
            copies.put(copy_of_checkout(Path(folder) / str(number)))

        def dies(one: Mutant) -> bool:
            copy = copies.get()
            try:
                killed = is_killed(one, modules[one.module], copy)
            finally:
                copies.put(copy)
            if not killed:
                print(f"survives: {one.module}\n{one.change}\n", flush=True)
            return killed

        spare = copies.get()
        for module in sorted({one.module for one in real}):
            if not passes(modules[module], spare):
                sys.exit(f"{' '.join(modules[module])} fail without any mutant")
        copies.put(spare)
        with ThreadPoolExecutor(chosen.at_once) as pool:
            killed = sum(pool.map(dies, real))
    print(
        f"{killed} of {len(real)} killed ({killed / max(len(real), 1):.1%}); {len(same)} of {len(drawn)} change nothing"
    )
    return 0 if killed >= 0.9 * len(real) and len(same) <= 0.05 * len(drawn) else 1


def copy_of_checkout(to: Path) -> Path:
    """Copy the files that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


if __name__ == "__main__":
    sys.exit(main())
