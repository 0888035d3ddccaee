"""What `make torture` leaves out is in the code, exactly once, and so are the modules that `make mutants` changes."""

import tomllib
from pathlib import Path

from tests.mutants.collectives import changed, listed

ROOT = Path(__file__).parents[2]


def test_every_exchange_that_is_left_out_is_there():
    every = listed()
    assert len({one.name for one in every}) == len(every) >= 40
    for one in every:
        code = (ROOT / one.module).read_text(encoding="utf-8")
        compile(changed(code, one.call, one.without), one.module, "exec")
        assert (ROOT / one.tests[0].partition("::")[0]).exists()


def test_the_modules_that_decide_and_their_tests_are_there():
    modules = tomllib.loads((ROOT / "tests/mutants/modules.toml").read_text(encoding="utf-8"))
    tests = [word.partition("::")[0] for words in modules.values() for word in words if word.startswith("tests/")]
    files = [*modules, *tests]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_mutants_that_change_nothing_are_of_lines_that_are_there():
    listed = tomllib.loads((ROOT / "tests/mutants/equivalent.toml").read_text(encoding="utf-8"))["mutant"]
    lines = {file: (ROOT / file).read_text(encoding="utf-8").splitlines() for file in {one["module"] for one in listed}}
    before = [(one["module"], line) for one in listed for line in one["change"].splitlines() if line.startswith("-")]
    assert before and [(file, line) for file, line in before if line[1:] not in lines[file]] == []
