"""The Horovod wheel built by install-horovod computes correctly; its two modules are never in the same process."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi import PATIENCE_S

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.world_size(4)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.tour), 4])
def test_every_operation_that_we_use_gives_the_right_values(mpirun, framework, ranks):
    result = mpirun(ranks, PROGRAMS / f"horovod_{framework}_values.py", timeout=240, warm=framework)
    assert sorted(line for line in result.stdout.splitlines() if line.endswith("values are right")) == [
        f"rank {rank} of {ranks}: values are right" for rank in range(ranks)
    ]


def test_setting_up_again_takes_seconds_and_builds_nothing():
    command = [sys.executable, "-m", "hpctrain", "install-horovod", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["built"] is False


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_wheel_names_no_folder_of_the_environment_it_was_built_in(framework):
    """The wheel is cached for other environments, which may outlive that one."""
    folder = Path(importlib.metadata.distribution("horovod").locate_file(f"horovod/{framework}"))
    library = next(folder.glob("mpi_lib*.so"))
    told = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "$ORIGIN" in told
    assert sys.prefix not in told
