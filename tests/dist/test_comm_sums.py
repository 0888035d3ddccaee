"""World, Group and the sums over ranks, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import EXPECTED_RANKS
from tests.support.mpi import mpirun

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
HERE = {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 3, 4)])
def test_sums_and_collectives_are_right(ranks: int) -> None:
    result = mpirun(ranks, PROGRAMS / "comm_sums.py", env=HERE)
    said = sorted(line for line in result.stdout.splitlines() if line.endswith("right"))
    assert said == [f"rank {rank} of {ranks}: right" for rank in range(ranks)]


@pytest.mark.world_size(2)
def test_singletons_are_noticed_before_anything_is_done() -> None:
    result = mpirun(2, PROGRAMS / "comm_sums.py", env=HERE | {EXPECTED_RANKS: "4"}, check=False)
    assert result.returncode != 0
    assert "the launcher started 4 ranks but MPI sees 2" in result.output


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 4)])
def test_a_loop_of_ones_own_in_under_40_lines(ranks: int) -> None:
    program = ROOT / "examples" / "own_loop_torch.py"
    assert len([line for line in program.read_text().splitlines() if line.strip()]) < 40
    result = mpirun(ranks, program, env=HERE)
    assert result.stdout.startswith(f"{ranks} ranks, reducer ")
    assert float(result.stdout.rsplit(" ", 1)[1]) < 0.15


@pytest.mark.world_size(2)
def test_horovods_thread_gives_way_to_computing_and_no_other_does(tmp_path: Path) -> None:
    program = tmp_path / "priorities.py"
    program.write_text(
        "import os\n"
        "from hpctrain.reduce import horovod_setup\n"
        "from hpctrain.comm.world import connect\n"
        "def priorities():\n"
        "    return {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir('/proc/self/task')}\n"
        "group = connect().data\n"
        "before = priorities()\n"
        "horovod_setup.start(horovod_setup.load('torch'), group, on_gpu=False)\n"
        "after = priorities()\n"
        "kept = all(after.get(task, own) == own for task, own in before.items())\n"
        "print('kept' if kept else 'changed', max(after.values()) > max(before.values()))\n"
    )
    assert mpirun(2, program, env=HERE).stdout.splitlines() == ["kept True"] * 2
