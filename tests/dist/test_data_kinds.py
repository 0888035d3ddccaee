"""Variable lengths, samplers, datasets that draw, and streams: the same samples on any ranks, and exact resumes."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from tests.support.command import last_words
from tests.support.mpi import mpirun

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/dist/programs/data_kinds.py"
KINDS = ["weighted", "grouped", "endless", "lines"]

pytestmark = pytest.mark.slow


def train(ranks: int, *parts: str, cwd: Path) -> None:
    """Runs of FOLDER:STEPS, each of which resumes what is there."""
    mpirun(ranks, PROGRAM, ",".join(KINDS), *parts, cwd=cwd, env={"PYTHONPATH": str(ROOT)}, timeout=200, warm="torch")


def seen(folder: Path, ranks: int) -> dict[str, list[str]]:
    """Samples in the order of the global batches, by kind; forgets them."""
    found = {}
    for kind in KINDS:
        files = [folder / f"{kind}-{rank}" for rank in range(ranks)]
        found[kind] = " ".join(
            map(" ".join, zip_longest(*(file.read_text().splitlines() for file in files), fillvalue=""))
        ).split()
        for file in files:
            file.unlink()
    return found


def weights(folder: Path, attempt: int) -> list[str]:
    """Hash of the weights by kind."""
    return [last_words(folder / f"run-{kind}", attempt)[0]["weights_hash"] for kind in KINDS]


@pytest.mark.world_size(2)
def test_twenty_and_twenty_steps_are_forty_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    for name in ("whole", "parts", "changed"):
        (tmp_path / name).mkdir()
    train(1, "changed:20", cwd=tmp_path)
    alone = seen(tmp_path / "changed", 1)
    train(2, "whole:40", "parts:20", "parts:40", "changed:40", cwd=tmp_path)
    whole = seen(tmp_path / "whole", 2)
    assert all(len(samples) > 250 for samples in whole.values())
    assert seen(tmp_path / "parts", 2) == whole
    assert weights(tmp_path / "parts", 2) == weights(tmp_path / "whole", 1)
    rest = seen(tmp_path / "changed", 2)
    assert {kind: alone[kind] + rest[kind] for kind in KINDS} == whole
