"""Every program of docs/migrate.md trains as written, before and after the migration."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpctrain.programs.plain_command import reserve_port
from tests.support import foreign_programs
from tests.support.command import PROJECT, environment, events, hpctrain
from tests.support.mpi import LAUNCH_S, run_in_group

PAGE = (PROJECT / "docs" / "migrate.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## From (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
NEEDS = {
    "torchrun and DDP": "torch",
    "Horovod": "horovod",
    "Lightning": "lightning",
    "Keras fit": "keras",
    "DeepSpeed": "deepspeed",
}
"""Package that each program imports before the migration."""
OF_TORTURE = ("lightning", "deepspeed")
"""Programs tested by ``make torture`` only."""
KEYS = {"DeepSpeed": ["--train.clip_norm", "1.0", "--parallel.shard", "optimizer"]}
"""Options that the page adds."""


BEFORE = [name for name, needed in NEEDS.items() if foreign_programs.ALL or needed not in OF_TORTURE]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the programs share."""
    shared = PAGE.partition("\n## ")[0]
    (tmp_path / "net.py").write_text(blocks(shared)[0])
    (tmp_path / "run.yaml").write_text(blocks(shared, "yaml")[0])
    return tmp_path


def test_each_section_has_a_before_and_an_after():
    assert SECTIONS.keys() == NEEDS.keys()
    for text in SECTIONS.values():
        assert [block.split(":")[0] for block in blocks(text)] == ["# before", "# after"]


def test_the_table_counts_lines():
    """Blank lines and comments do not count."""
    rows = re.findall(r"^\| \[.*?\]\(#from-.*?\) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    counted = [tuple(str(len(code(block))) for block in blocks(text)) for text in SECTIONS.values()]
    assert rows == counted


def code(block: str) -> list[str]:
    """Lines of code of a program."""
    return [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize("name", BEFORE)
def test_before(name, folder):
    (folder / "train.py").write_text(blocks(SECTIONS[name])[0])
    with reserve_port() as holder:
        one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        own = environment({**one_rank, "MASTER_PORT": str(holder.getsockname()[1])})
        done = run_in_group([sys.executable, "train.py"], own, folder, LAUNCH_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NEEDS)
def test_after(name, folder):
    framework = "tensorflow" if name == "Keras fit" else "torch"
    (folder / "task.py").write_text(blocks(SECTIONS[name])[1])
    hpctrain("train", "run.yaml", *KEYS.get(name, []), cwd=folder, warm=framework)
    losses = [event["metrics"]["loss"] for event in events(folder / "runs/migrated", "eval")]
    assert losses[-1] < 0.5 * losses[0] or losses[-1] < 0.3
