"""The proof on a GPU: what it writes, and rows that the machine's PyTorch is too old for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_proof import plans, proof
from benchmarks.gpu_proof.launch import Found
from benchmarks.gpu_proof.rows import Skipped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_plans_of_fsdp2_are_skipped_with_an_older_pytorch(shard, monkeypatch):
    monkeypatch.setattr(plans, "is_too_old", lambda: True)
    setting: Any = SimpleNamespace(word=shard)
    with pytest.raises(Skipped, match=f"parallel.shard: {shard} needs PyTorch 2.11"):
        plans.row(setting)


def test_what_is_known_is_written_though_a_row_or_the_whole_is_ended(tmp_path, monkeypatch):
    """A row may end in any way, the time limit is nobody's failure, and the machine may end the process itself."""
    clock = [0.0]
    monkeypatch.setattr(proof, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(proof, "facts", lambda: {"device": "none"})

    def run_row(row, folder, timeout_s):
        if row.name == "train-fp32":
            raise ValueError("half a file")
        if row.name == "monitor-clock":
            clock[0] += timeout_s
            return Found(row.name, row.what, "failed", reason="no end")
        if row.name == "devices-seen":
            raise KeyboardInterrupt
        return Found(row.name, row.what, "passed")

    monkeypatch.setattr(proof, "run_row", run_row)

    def known():
        rows = json.loads((tmp_path / "gpu-proof.json").read_text())["rows"]
        return {row["name"]: (row["status"], row["reason"]) for row in rows}

    with pytest.raises(KeyboardInterrupt):
        proof.prove(["train-fp??", "devices-*"], tmp_path, 1)
    late = "skipped", "not run within 1 minutes"
    assert known()["train-fp32"] == ("failed", "ValueError: half a file")
    assert known()["train-fp16"] == ("passed", "") and known()["devices-links-2"] == late
    assert proof.prove(["monitor-clock", "horovod-build"], tmp_path, 1) == 0
    assert known() == {"monitor-clock": late, "horovod-build": late}
