"""The core of ``make dist``: builds of a commit are reproducible, and work outside the checkout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not permitted here: this is not a clone")
def test_the_core_of_a_release(tmp_path):
    command = [sys.executable, ROOT / "env/dist.py", "--core", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to the same bytes" in done.stdout and "the core answers each command" in done.stdout
    made = f"hpctrain-{hpctrain.__version__}"
    assert len(list(tmp_path.glob(f"{made}*.whl"))) == len(list(tmp_path.glob(f"{made}.tar.gz"))) == 1
    bill = json.loads((tmp_path / f"{made}.cdx.json").read_text())
    versions = {each["name"]: each["version"] for each in bill["components"]}
    assert versions["hpctrain"] == hpctrain.__version__ and {"numpy", "h5py", "PyYAML"} <= set(versions)
