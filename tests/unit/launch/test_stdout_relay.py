"""The launcher's output on its way to the user."""

import os
import subprocess
import time

from hpctrain.launch.launcher_messages import Passing


def test_ranks_that_print_without_end_leave_time_for_signals(tmp_path):
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


def test_a_terminal_that_shows_nothing_stops_only_the_output():
    """Ctrl-S, or a pager: the supervisor must still see signals and dead ranks."""
    shown, terminal = os.openpty()
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        passing = Passing(endless.stdout, terminal)
        while not passing.unshown:  # until the terminal is full
            passing.pump(0.05)
        assert os.get_blocking(terminal), "the shell has this terminal, too"
        endless.kill()
        while passing.unshown:
            assert os.read(shown, 1 << 16).startswith((b"y", b"\r", b"\n"))
            passing.pump(0.05)
        passing.close()
    os.close(terminal)
    os.close(shown)
