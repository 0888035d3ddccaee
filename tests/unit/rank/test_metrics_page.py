"""The metrics of docs/metrics.md in a run: events, files, report; and an evaluation that was cut short is repeated."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hpctrain.config.sections import CheckpointConfig, Config, MonitorConfig, ReduceConfig, TrainConfig
from hpctrain.rank.fit import fit
from hpctrain.report.explain import explain
from hpctrain.report.page import make_sections, render
from hpctrain.run.events import Eval
from hpctrain.run.run_view import RunView
from tests.tasks import interrupted_metric

pytestmark = [pytest.mark.usefixtures("environment_of_a_run"), pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
EXAMPLE = next(block for block in BLOCKS if "Calibration" in block)


def config_of(folder: Path, source: str) -> Config:
    (folder / "clicks.py").write_text(source)
    return Config(
        name="run",
        run_dir=str(folder / "run"),
        task=f"{folder}/clicks.py:task",
        train=TrainConfig(epochs=2, global_batch=32, eval_batch_per_rank=50),
        reduce=ReduceConfig(kind="none"),
        checkpoint=CheckpointConfig(interval="none", best_metric="hard/auc", best_mode="max"),
        monitor=MonitorConfig(enabled=False),
    )


def test_the_example_reports_numbers_curves_and_a_matrix(tmp_path):
    from sklearn.metrics import f1_score

    summary = fit(config_of(tmp_path, EXAMPLE))
    names = {"loss", "auc", "f1", "calibration"}
    assert set(summary.metrics) == names | {f"hard/{name}" for name in names}
    view = RunView(tmp_path / "run")
    found = view.figures()
    assert found is not None and found.step == 16
    assert sorted(found.figures) == ["confusion", "hard/confusion", "hard/roc", "roc"]
    (passed, taken), (missed, hit) = found.figures["confusion"].counts  # type: ignore[union-attr]
    classes = [0] * (passed + taken) + [1] * (missed + hit)
    predicted = [0] * passed + [1] * taken + [0] * missed + [1] * hit
    assert len(classes) == 101
    assert summary.metrics["f1"] == pytest.approx(f1_score(classes, predicted, average="macro"), rel=1e-6)
    data = view.history()
    assert data.metrics["hard/auc"].value[-1] == summary.metrics["hard/auc"]
    sections = {section.key: section for section in make_sections(data, found)}
    assert sections["metric_confusion"].rows == [("0", passed, taken), ("1", missed, hit)]
    assert sections["metric_hard_roc"].header == ("false positive rate", "true positive rate")
    page = render(data, explain(data), list(sections.values()))
    assert "Validation hard/confusion at step 16" in page and f"<td>{taken}</td>" in page
    assert page.count(">validation hard/loss</text>") == 2, "against steps, and against time"


def test_an_evaluation_that_was_cut_short_is_repeated_from_its_beginning(tmp_path):
    source = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[3])!r}]\n"
        "from tests.tasks.interrupted_metric import Interrupting\n"
        f"{EXAMPLE.replace('Calibration()', 'Interrupting(Calibration())')}"
    )
    config = config_of(tmp_path, source)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every_steps=5, interval="none"))
    with interrupted_metric.at_update(5), pytest.raises(interrupted_metric.Interruption):  # of the second evaluation
        fit(config)
    fit(config)
    through = dataclasses.replace(config, run_dir=str(tmp_path / "through"))
    fit(through)
    wanted, found = (
        [(event.step, event.metrics) for event in RunView(each.run_dir or "").events() if isinstance(event, Eval)]
        for each in (through, config)
    )
    assert [step for step, _ in found] == [8, 16] and found == wanted
