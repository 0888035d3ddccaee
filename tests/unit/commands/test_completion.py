"""Completion scripts: in bash as a shell runs them, of zsh and fish what they consist of."""

from __future__ import annotations

import subprocess

import pytest

from hpctrain.cli import COMMANDS, main
from tests.support.mpi import PATIENCE_S


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["ev"], {"evaluate"}),
        (["train", "--sched"], {"--schedule.kind", "--schedule.plateau.patience"}),
        (["run", "--acc"], {"--accept"}),
        (["ckpt", "ver"], {"verify"}),
        (["completion", "f"], {"fish"}),
        (["init", "--k"], {"--kind"}),
        (["doctor", "--schedule"], set()),
    ],
)
def test_bash_completes(script: str, line: list[str], found: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["hpctrain", *line])
    ask = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(line)}; _hpctrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    got = set(done.stdout.split())
    assert got >= found if found else not got


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_all_commands_are_in_the_others(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "train.epochs" in text


def test_fish_gets_help_texts_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "fish"])
    assert r"-a track -d 'send a run\'s events to trackers, register its model'" in capsys.readouterr().out
