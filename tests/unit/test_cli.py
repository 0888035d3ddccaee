"""What the command line makes of errors."""

from __future__ import annotations

from typing import NoReturn

import pytest

from hpctrain import cli


def test_a_run_of_somebody_else_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(words: list[str]) -> NoReturn:
        raise PermissionError(13, "Permission denied", "/runs/ann/run.json")

    monkeypatch.setattr(cli, "dispatch", refused)
    assert cli.main(["status", "/runs/ann"]) == 64
    assert capsys.readouterr().err.startswith("hpctrain: /runs/ann/run.json: Permission denied\n  fix: ")
