"""What pages, examples, help texts and messages print is accepted: options, keys, values, run files, extras, targets.

Commands are parsed by the real parsers, and options by the real loader of run files. Those of README, the landing page,
reports, recipes, the tutorial, migrate and larger models are run as well (tests/dist/test_readme.py, test_recipes.py,
test_tutorial.py, test_migrate_page.py), and of the other pages those that look at a finished run. The rest is only
parsed: it needs a scheduler, hosts, GPUs, an object store or minutes, or belongs to files that the reader has.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from hpctrain import cli
from hpctrain.config.loading import load
from hpctrain.config.reference import keys, sections
from hpctrain.errors import UserError
from hpctrain.launch import sweep
from hpctrain.launch.engines.slurm import profile
from tests.support import printed
from tests.support.printed import PAGES, ROOT, Printed, blocks, place, prose

SECTIONS = {key.partition(".")[0] for key in keys()}
OF_OTHERS = {"parallel.*", "optimizer.apply", "optimizer.register_step_pre_hook", "optimizer.state", "train.py"}
"""Names in inline code that look like keys."""
BASE = "name: wave\ntask: wave.py:task\ntrain: {epochs: 5, global_batch: 64}\n"


def wrong_with(one: Printed, folder: Path) -> str | None:
    """Why the command line refuses a command; None if it takes it."""
    try:
        for words in one.lines():
            accept(words, folder)
    except UserError as error:
        if one.is_mention and re.search("arguments are required|expected one argument|needs a value", error.what):
            return None
        return f"{one.place}: {one.text}\n    {error.what}; {error.fix}"
    return None


def accept(words: Sequence[str], folder: Path) -> None:
    """Raises UserError unless the command line takes the words."""
    name, *rest = words
    if "--help" in rest:
        return
    parser = cli.parser_of(name)
    before, program = cli.before_program(rest)
    args, overrides = parser.parse_known_args(before)
    if (program and parser.get_default("program") is None) or (overrides and not hasattr(args, "overrides")):
        raise UserError(f"unrecognized: {' '.join(overrides or program)}", "")
    run_file = folder / "run.yaml"
    points = sweep.combinations(overrides) if name == "sweep" else [overrides]
    for axis in getattr(args, "array", []):
        points += sweep.combinations([f"--{axis}"]) if "=" in axis else []
    for point in points:
        load(run_file, point)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file that says little."""
    made = tmp_path_factory.mktemp("printed")
    (made / "run.yaml").write_text(BASE)
    return made


@pytest.mark.parametrize("source", ["pages", "files", "messages"])
def test_commands(source, folder):
    found = list({"pages": printed.of_pages, "files": printed.of_files, "messages": printed.of_messages}[source]())
    assert len(found) > 40
    assert [wrong for one in found if (wrong := wrong_with(one, folder))] == []


def test_run_files(folder):
    """Each YAML block of run file keys, with name, task and samples where the page leaves them to the reader."""
    found = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, content, start in blocks(text):
            if language not in ("", "yaml") or not is_run_file(content):
                continue
            found += 1
            given = yaml.safe_load(content)
            train = given.get("train") or {}
            train = {**({} if "steps" in train else {"epochs": 2}), **train}
            train = {**({} if "batch_per_rank" in train else {"global_batch": 64}), **train}
            program = "command" in (given.get("launch") or {})
            own = {"name": "x"} if program else {"name": "x", "task": "x.py:task", "train": train}
            file = folder / f"block-{found}.yaml"
            file.write_text(yaml.safe_dump({**own, **given, **({} if program else {"train": train})}))
            try:
                load(file)
            except UserError as error:
                pytest.fail(f"{place(page, text, start)}: {error}")
    assert found >= 20


def is_run_file(content: str) -> bool:
    """Whether a block holds keys of a run file."""
    try:
        found = yaml.safe_load(content)
    except yaml.YAMLError:
        return False
    return isinstance(found, dict) and bool(SECTIONS & found.keys())


def test_profiles(tmp_path):
    profiles = [content for page in PAGES for name, content, _ in blocks(page.read_text()) if is_profile(name, content)]
    assert len(profiles) >= 4
    for number, content in enumerate(profiles):
        (tmp_path / f"{number}.toml").write_text(content)
        assert profile.read(tmp_path / f"{number}.toml")


def is_profile(language: str, content: str) -> bool:
    """Whether a block is a profile of a Slurm site."""
    return language in ("", "toml") and content.startswith("[launch")


def test_keys_in_prose():
    wrong = []
    for page in PAGES:
        text = prose(page.read_text(encoding="utf-8"))
        for found in re.finditer(r"`(?:--)?(([a-z]+)\.[a-z_.*]+)(?:[: ][^`]*)?`", text):
            if found[2] in SECTIONS - {"task_args"} and found[1] not in {*keys(), *sections(), *OF_OTHERS}:
                wrong.append(f"{place(page, text, found.start())}: {found[1]}")
    assert wrong == []


def test_extras_targets_and_benchmarks():
    """What pip, make and ``python -m benchmarks`` are given."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {*setup["options.extras_require"]}
    makefile, texts = (ROOT / "Makefile").read_text(), {page: page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {module: module.read_text(encoding="utf-8") for module in printed.MODULES}
    folders = (ROOT / "benchmarks", ROOT / "hpctrain/bench", ROOT / "hpctrain/commands")
    programs = {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    for path, text in texts.items():
        for found in re.findall(r"(?:hpctrain|[\"'.]|whl)\[([a-z]+(?:,[a-z]+)*)\]\"", text):
            assert {*found.split(",")} <= extras, f"{path}: {found}"
        for target in re.findall(r"(?:^|`)make ([a-z-]+)(?=`|$|  )", text, re.M):
            assert f"\n{target}:" in makefile, f"{path}: make {target}"
        for name, options in re.findall(r"python -m benchmarks\.(\w+)([^`|#\n]*)", text):
            own = [one for path, one in programs.items() if name in (path.stem, path.parent.name)]
            assert own, f"{path}: {name}"
            for option in re.findall(r"--[a-z-]+", options):
                assert any(f'"{option}"' in one for one in programs.values()), f"{path}: {name} {option}"


def test_anchors_of_links():
    def anchors(path):
        text = path.read_text(encoding="utf-8")
        titles = [re.sub(r"[`*]|\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.*)", text, re.M)]
        own = re.findall(r"^\(([\w.-]+)\)=$|(?:id|name)=\"([^\"]+)\"", text, re.M)
        named = {name for pair in own for name in pair}
        return named | {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    wrong, found = [], 0
    for page in PAGES:
        text = prose(page.read_text(encoding="utf-8"))
        for path, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
            found += 1
            target = page.parent / path if path else page
            if target.suffix == ".md" and target.exists() and anchor not in anchors(target):
                wrong.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert found > 100 and wrong == []
