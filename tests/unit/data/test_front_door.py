"""The data room's front door stays cheap: what a format needs is loaded when data of that format is opened."""

from __future__ import annotations

import subprocess
import sys


def test_the_front_door_loads_no_format() -> None:
    program = "import sys, hpctrain.data; print({'h5py', 'torch', 'tensorflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
