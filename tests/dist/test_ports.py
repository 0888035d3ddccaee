"""Programs in published form and their ports (examples/ports) give the same numbers, and ports change few lines.

Runs on 1 and 2 ranks; with HPCTRAIN_PORTS=all also on 3 and 4, with each port killed and resumed on 1, 2 and 4, and
with LoRA, which needs env/foreign.txt.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from tests.support.command import events, hpctrain
from tests.support.mpi import PATIENCE_S, mpirun

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
PROGRAM = ROOT / "tests/dist/programs/ports.py"
ALL = os.environ.get("HPCTRAIN_PORTS") == "all"
RANKS = (1, 2, 3, 4) if ALL else (1, 2)
STOPS = {1: 8, 2: 17, 3: 23}
"""Step after which a run with changing numbers of ranks stops, by number of ranks."""
KILLED_AFTER = 13
LIMIT_S = 240


@dataclass(frozen=True)
class Port:
    """What is expected of a port."""

    written: int
    """Maximum number of lines of the port that the original does not have."""
    metric: str | None = None
    """Validation metric to compare, or None."""
    draws: float | None = None
    """Relative tolerance of loss and metric if random numbers are drawn differently from the original; None if none
    are drawn."""
    alike: bool = True
    """Whether ranks draw the same random numbers as one process."""
    framework: str = "torch"


PAIRS = {
    "bert": Port(written=14, metric="f1"),
    "clip": Port(written=9),
    "dcgan": Port(written=28, draws=0.15),
    "dlrm": Port(written=14, metric="auc"),
    **({"lora": Port(written=8)} if ALL else {}),
    "lstm": Port(written=26, metric="loss"),
    "siamese": Port(written=13, metric="accuracy"),
    "tokens": Port(written=12),
    "unet3d": Port(written=11, metric="dice", draws=0.15),
    "vae": Port(written=3, draws=0.02, alike=False, framework="tensorflow"),
}
CHAOS_AFTER = {"dcgan": 12}
"""Number of steps until rounding errors grow: Adam moves a weight whose gradient is a rounding error as much as any
other. In float64, the ranks of dcgan agree to 1e-15 over all steps."""
SOME = ("dlrm", "tokens")
"""Ports with sparse tables and a stream. Other tests cover per-lane state, dropout and Keras' ``train_step``."""
PREPARED = ("tokens",)
"""Ports that make their data when run as a program."""
CHANGING = tuple(name for name, port in PAIRS.items() if port.alike) if ALL else SOME

pytestmark = pytest.mark.timeout(LIMIT_S * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs, and of the data that the programs make."""
    return tmp_path_factory.mktemp("ports")


def launch(ranks: int, framework: str, folder: Path, entries: list[Any], code: int = 0) -> None:
    """Train with programs/ports.py."""
    done = mpirun(
        ranks, PROGRAM, json.dumps(entries), cwd=folder,
        timeout=LIMIT_S, check=False, warm=framework,
    )  # fmt: skip
    assert (done.returncode == 0) == (code == 0), done.output


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    """`trained(framework)`: folder of all runs of its programs that are not killed, made once."""

    @cache
    def made(framework: str) -> Path:
        names = [name for name, port in PAIRS.items() if port.framework == framework]
        for ranks in RANKS:
            part = {"stop_after": STOPS[ranks]} if ranks != RANKS[-1] else {}
            entries: list[Any] = [[name, f"{name}-{ranks}", {}] for name in names]
            entries += [[name, f"{name}-changing", part] for name in names if name in CHANGING]
            if ranks == 1:  # originals come last: TensorFlow keeps the number of threads set by its first user
                prepared = [[name, f"{name}-prepared", {"python": "port.py"}] for name in names if name in PREPARED]
                originals = [[name, f"{name}-original", {"python": "original.py"}] for name in names]
                entries = [*prepared, *entries, *originals]
            launch(ranks, framework, folder, entries)
        return folder

    return made


def printed(run: Path, kind: str, value: str) -> list[float]:
    """Values that the original prints for each ``step`` or ``epoch``; several losses on a line are added."""
    lines = (run / "printed").read_text().splitlines()
    found = [re.findall(rf"\b{value}\w* (\S+)", line) for line in lines if line.startswith(f"{kind} ")]
    return [sum(map(float, numbers)) for numbers in found]


def losses(run: Path) -> list[float]:
    """Losses of all steps; repeated steps count once, and must have repeated their loss."""
    found: dict[int, float] = {}
    for event in events(run, "train"):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"], event["step"]
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def validations(run: Path, metric: str) -> list[float]:
    """Validation metric of each epoch."""
    return [event["metrics"][metric] for event in events(run, "eval")]


def assert_alike(name: str, found: list[float], wanted: list[float]) -> None:
    """Check losses against those of another number of ranks."""
    steps = CHAOS_AFTER.get(name, len(wanted))
    assert found[:steps] == pytest.approx(wanted[:steps], rel=1e-6)
    assert found == pytest.approx(wanted, rel=1e-2)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", PAIRS)
def test_a_port_gives_the_numbers_of_the_original(name, trained):
    port = PAIRS[name]
    runs = trained(port.framework)
    original, alone = runs / f"{name}-original", losses(runs / f"{name}-1")
    assert len(alone) >= 30
    by_step = printed(original, "step", "loss") or np.repeat(printed(original, "epoch", "loss"), 10).tolist()
    for ranks in RANKS:
        found = losses(runs / f"{name}-{ranks}")
        if port.draws is None:
            assert found == pytest.approx(by_step, rel=1e-6)
        else:
            assert len(found) == len(by_step)
            assert np.mean(found[-10:]) == pytest.approx(np.mean(by_step[-10:]), rel=port.draws)
        if port.alike:
            assert_alike(name, found, alone)
        if port.metric is not None:
            said = printed(original, "epoch", port.metric)
            assert validations(runs / f"{name}-{ranks}", port.metric) == pytest.approx(said, rel=port.draws or 1e-6)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", CHANGING)
def test_a_run_that_changes_its_number_of_ranks_gives_the_same_numbers(name, trained):
    port = PAIRS[name]
    runs = trained(port.framework)
    assert [event["step"] for event in events(runs / f"{name}-changing", "resumed")] == list(STOPS.values())[
        : len(RANKS) - 1
    ]
    assert_alike(name, losses(runs / f"{name}-changing"), losses(runs / f"{name}-1"))


KILLED = [(name, ranks) for name in (PAIRS if ALL else SOME) for ranks in ((1, 2, 4) if ALL else (2,))]
"""Programs to kill, and the number of ranks."""


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Any:
    """`resumed(framework, ranks)`: folder of runs that are killed, each in its own launch, and resumed in one."""

    @cache
    def made(framework: str, ranks: int) -> Path:
        names = [name for name, on in KILLED if on == ranks and PAIRS[name].framework == framework]
        saving = {"keys": {"checkpoint.every_steps": 3}}
        for name in names:
            launch(
                ranks, framework, folder, [[name, f"{name}-killed-{ranks}", saving | {"kill_after": KILLED_AFTER}]], 1
            )
        launch(ranks, framework, folder, [[name, f"{name}-killed-{ranks}", saving] for name in names])
        return folder

    return made


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("name", "ranks"), KILLED)
def test_a_port_that_is_killed_and_resumed_ends_bit_for_bit_the_same(name, ranks, trained, resumed):
    framework = PAIRS[name].framework
    straight, broken = trained(framework) / f"{name}-{ranks}", resumed(framework, ranks) / f"{name}-killed-{ranks}"
    (event,) = events(broken, "resumed")
    assert 0 < event["step"] < KILLED_AFTER
    assert losses(broken) == losses(straight)
    wanted, found = (CheckpointStore(run / "checkpoints").load() for run in (straight, broken))
    assert wanted.arrays.keys() == found.arrays.keys()
    assert [
        key for key, array in wanted.arrays.items() if not np.array_equal(array, found.arrays[key], equal_nan=True)
    ] == []
    assert wanted.meta["state"]["samples"] == found.meta["state"]["samples"]


@pytest.mark.world_size(2)
def test_the_command_of_the_docs(tmp_path):
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^hpctrain (.*examples/ports.*)$", page, re.M)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    hpctrain(*shlex.split(command), cwd=tmp_path, warm="torch")
    assert events(tmp_path / "runs/dlrm", "run_finished")[-1]["reason"] == "completed"


def code(path: Path) -> list[str]:
    """Lines of code of a program."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def written(name: str, folder: Path) -> int:
    """Lines of a port that the original does not have, according to ``diff``."""
    for program in ("original", "port"):
        (folder / program).write_text("\n".join(code(PORTS / name / f"{program}.py")) + "\n")
    done = subprocess.run(
        ["diff", folder / "original", folder / "port"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.stdout.count("\n> ")


def test_ports_are_written_in_few_lines(tmp_path):
    names = sorted(path.name for path in PORTS.iterdir() if path.is_dir())
    assert names == sorted({*PAIRS, "lora"})
    found = {name: written(name, tmp_path) for name in names}
    assert {name: lines for name, lines in found.items() if name in PAIRS and lines > PAIRS[name].written} == {}
    assert statistics.median(found.values()) <= 15
    assert all(len(code(PORTS / name / "run.yaml")) <= 4 for name in names)
