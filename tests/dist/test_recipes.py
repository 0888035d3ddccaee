"""The commands of docs/recipes.md run as printed, each recipe in a copy of its folder, and its model learns."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import foreign_programs as foreign
from tests.support.command import PROJECT, environment, events, hpctrain
from tests.support.mpi import run_in_group

PAGE = (PROJECT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^## [^\n]*\n((?:(?!^## ).)*)", PAGE, re.M | re.S)

pytestmark = [pytest.mark.world_size(2), pytest.mark.timeout(400)]


def carry_out(recipe: str, folder: Path) -> Path:
    """Run the commands of the section about a recipe in a copy of its folder, and return the folder."""
    (section,) = (section for section in RECIPES if f"examples/recipes/{recipe}`" in section)
    here = shutil.copytree(PROJECT / "examples/recipes" / recipe, folder / recipe)
    framework = "tensorflow" if recipe == "table" else "torch"
    for block in re.findall(r"```console\n(.*?)```", section, re.S):
        for program, *words in map(shlex.split, block.splitlines()):
            if program == "hpctrain":
                hpctrain(*words, cwd=here, timeout=200, warm=framework)
            else:
                done = run_in_group([sys.executable, *words], environment(), here, timeout=100)
                assert done.returncode == 0, done.output
    return here


def evaluations(run: Path, metric: str = "loss") -> list[float]:
    """A metric in each evaluation of a run."""
    return [float(event["metrics"][metric]) for event in events(run, "eval")]


def test_photos_train_from_folders_and_tars(tmp_path):
    runs = carry_out("images", tmp_path) / "runs"
    folders, tars = evaluations(runs / "resnet50"), evaluations(runs / "tars")
    assert len(folders) == len(tars) == len(evaluations(runs / "vit")) == 2


def test_weather_beats_persistence(tmp_path):
    run = carry_out("weather", tmp_path) / "runs/weather"
    assert evaluations(run)[-1] < 0.5 * evaluations(run, "persistence")[-1]


def test_volumes_are_segmented(tmp_path):
    dice = evaluations(carry_out("volumes", tmp_path) / "runs/volumes", "dice")
    assert dice[-1] > dice[0]


def test_a_table_is_packed_learnt_and_predicted(tmp_path):
    here = carry_out("table", tmp_path)
    auc = evaluations(here / "runs/table", "auc")
    assert auc[-1] > auc[0] > 0.5 and (here / "predicted.h5").exists()


if foreign.ALL:  # it needs env/foreign.txt
    MIXTURE = re.search(r"^hpctrain (run mixture.yaml .*)$", PAGE, re.M)[1].split()

    @pytest.mark.timeout(1200)
    def test_a_llama_is_trained_in_full_and_by_an_adapter_and_exported(tmp_path):
        """``compare.py`` fails unless logits are equal."""
        here = carry_out("llama", tmp_path)
        for run in (here / "runs/full", here / "runs/lora"):
            first, last = evaluations(run)
            assert last < first, "after it was resumed on one rank"
        whole, adapter = (here / name for name in ("base/model.safetensors", "tuned/adapter_model.safetensors"))
        assert adapter.stat().st_size < whole.stat().st_size / 3, "it has no frozen weight"
        resumed = evaluations(here / "runs/mixture")
        hpctrain(*MIXTURE, "--name", "whole", cwd=here, timeout=200, warm="torch")
        assert len(resumed) == 3 and resumed[1:] == pytest.approx(evaluations(here / "runs/whole"), abs=1e-3), (
            "the same samples"
        )


def test_a_search_prunes_trials_and_ends_like_the_best(tmp_path):
    pytest.importorskip("optuna")
    here = carry_out("sweep", tmp_path)
    ends = [events(run, "run_finished")[-1]["reason"] for run in sorted(here.glob("runs/sweep/[0-9]"))]
    assert len(ends) == 8 and set(ends) <= {"completed", "early_stop"}
    assert ends[:4] == ["completed"] * 4, "the pruner starts after four trials"
    bad = "import sweep; sweep.open_study('study.log').enqueue_trial({'lr': 1e-5, 'width': 8})"
    assert run_in_group([sys.executable, "-c", bad], environment(), here, timeout=100).returncode == 0
    hpctrain("sweep", "sweep.yaml", "--task_args.trial", "8,9", cwd=here, timeout=200, warm="torch")
    assert events(here / "runs/sweep/8", "run_finished")[-1]["reason"] == "early_stop", "it learns nothing"
