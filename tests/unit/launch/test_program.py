"""Programs on ranks outside a run: what they leave, and how long they may take."""

import os
import subprocess
import sys

import pytest

from hpctrain.launch import mpi_library
from hpctrain.launch.mpi_library import on_ranks
from hpctrain.system import processes

OUTLIVES_ITS_RANKS = (
    "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1)'])"
)
"""As an mpirun does that waits for ranks which have ended."""


def test_what_a_program_prints_and_its_code_are_kept():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ended = on_ranks([sys.executable, "-c", code], 1, None, os.environ, timeout_s=60)
    assert (ended.code, ended.output, ended.messages) == (3, "out\n", "err\n")


def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        on_ranks([sys.executable, "-c", "import time; time.sleep(600)"], 1, None, os.environ, timeout_s=0.2)


@pytest.mark.slow
def test_a_launcher_that_outlives_its_ranks_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(mpi_library, "ENDED_S", 0.5)
    launcher = subprocess.Popen([sys.executable, "-c", f"{OUTLIVES_ITS_RANKS}; time.sleep(600)"])
    try:
        mpi_library._wait(launcher, 60, has_ranks=True)
        assert launcher.poll() is None
    finally:
        processes.end_process(launcher, mpi_library.KILL_S)
