"""What other rooms see of the data room: every name is there, and none is loaded before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["hpctrain.data", "hpctrain.data.packing"])
def test_every_name_is_there_and_others_are_not(room: str) -> None:
    door = importlib.import_module(room)
    for name in door.__all__:
        assert getattr(door, name).__module__.startswith(f"{room}.") or name == "Samples"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = door.nothing


def test_nothing_is_loaded_before_it_is_used() -> None:
    program = "import sys, hpctrain.data.packing; print('numpy' in sys.modules, 'h5py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False False\n"
