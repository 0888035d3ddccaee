"""Tasks that cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.task_loader import load_task


@pytest.mark.parametrize("reference", ["broken_task:task", "broken_task.py:task"])
def test_a_task_with_a_syntax_error(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_task.py").write_text("def task(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match="fails to import: SyntaxError"):
        load_task(reference, {}, alone(), seed=0)
    sys.modules.pop("broken_task", None)
