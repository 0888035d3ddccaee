"""A model card speaks of a checkpoint that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import UserError
from hpctrain.registry.register import model_card
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that saved at step 900 and was ended at step 950."""
    run = RunDir(tmp_path)
    (run.checkpoints / "step-000000900").mkdir(parents=True)
    (run.checkpoints / "step-000000900" / "manifest.json").write_text('{"manifest": {}}')
    writer = EventWriter(run.events, print)
    writer.append(Train(step=950, loss=0.5, lr=1.0, samples_per_s=1.0, steps=1))
    writer.close()
    return run


def test_the_newest_checkpoint_is_named_not_the_last_step(run: RunDir) -> None:
    assert "| checkpoint | step 900 |" in model_card(RunView(run.path).history())
    assert "| checkpoint | step 900 |" in model_card(RunView(run.path).history(), 900)


def test_a_checkpoint_that_is_not_there_has_no_card(run: RunDir) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 901"):
        model_card(RunView(run.path).history(), 901)


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    assert "| checkpoint | none |" in model_card(RunView(tmp_path).history())
