"""Rows of the proof on a GPU that the machine's PyTorch is too old for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_proof import plans
from benchmarks.gpu_proof.rows import Skipped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_plans_of_fsdp2_are_skipped_with_an_older_pytorch(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "is_too_old", lambda: True)
    setting: Any = SimpleNamespace(word=shard)
    with pytest.raises(Skipped, match=f"parallel.shard: {shard} needs PyTorch 2.11"):
        plans.row(setting)
