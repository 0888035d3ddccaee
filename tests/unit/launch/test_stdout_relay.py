"""The launcher's output on its way to the user."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from hpctrain.launch.launcher_messages import Passing


def test_ranks_that_print_without_end_leave_time_for_signals(tmp_path: Path) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless, open(tmp_path / "out", "wb") as out:
        assert endless.stdout is not None
        passing = Passing(endless.stdout, out.fileno())
        begin = time.monotonic()
        while not passing.text:
            passing.pump(0.1)
        assert time.monotonic() - begin < 60
        endless.kill()
        passing.pump(10)
    assert passing.text.endswith("y\n") and (tmp_path / "out").stat().st_size >= len(passing.text)
