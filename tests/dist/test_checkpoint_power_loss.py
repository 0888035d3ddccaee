"""Order of system calls, and power losses, when several ranks write one checkpoint."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.mpi import find_mpirun, is_open_mpi, rank_environment
from tests.support.power_loss_checks import check_losses, check_order, record

ROOT = Path(__file__).parents[2]
SEED = int.from_bytes(os.urandom(4), "little")


@pytest.mark.world_size(2)
def test_two_ranks_write_in_the_safe_order_and_a_power_loss_costs_nothing_announced(tmp_path):
    launcher = find_mpirun()
    assert launcher
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if is_open_mpi(launcher) else []
    environment = rank_environment({"PYTHONPATH": str(ROOT)})
    recorded, scratch = (tmp_path / "recorded").resolve(), tmp_path / "left"
    recorded.mkdir()
    scratch.mkdir()
    calls = record(recorded, [launcher, *options, "-n", "2", sys.executable], environment, "connect")
    assert {Path(call.path).name for call in calls} >= {f"shard-0000{rank}-of-00002.h5" for rank in (0, 1)}
    check_order(calls)
    check_losses(recorded, calls, scratch, SEED)
