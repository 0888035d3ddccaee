"""The README does what it says: its task, its run file and its commands, as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.command import PROJECT, environment, events, hpctrain
from tests.support.mpi import python, run_in_group

README = (PROJECT / "README.md").read_text(encoding="utf-8")
REPORTS = (PROJECT / "docs" / "reports.md").read_text(encoding="utf-8")
PARALLEL = (PROJECT / "docs" / "parallel.md").read_text(encoding="utf-8")
TASKS = (PROJECT / "docs" / "tasks.md").read_text(encoding="utf-8")
SHORTER = {
    "examples/chartext.yaml": ["--train.steps", "5"],
    "examples/gan.yaml": ["--train.epochs", "2"],
    "submit": ["--dry-run"],
}
"""What is added to commands that would take minutes, or need a cluster."""
ELSEWHERE = ("hpctrain status", "hpctrain install-horovod")
"""Commands that need what this test does not make; tests/slurm and tests/dist/test_horovod_wheel.py run them."""


def block(text: str, language: str, number: int = 0) -> str:
    """A fenced block of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)[number]


def commands(text: str) -> list[list[str]]:
    """The ``hpctrain`` commands in a page's console blocks."""
    lines = [line for part in re.findall(r"```console\n(.*?)```", text, re.S) for line in part.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("hpctrain ")]


def framework(words: list[str]) -> str:
    """Of the run file that a command is about."""
    return "tensorflow" if any("keras" in word for word in words) else "torch"


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A folder with the README's files and the examples."""
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    (tmp_path / "wave.py").write_text(block(README, "python"))
    (tmp_path / "wave.yaml").write_text(block(README, "yaml"))
    shutil.copy(tmp_path / "wave.yaml", tmp_path / "run.yaml")
    return tmp_path


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_every_command_of_the_readme(newcomer: Path) -> None:
    found = commands(README)
    assert len(found) >= 6
    for words in found:
        if " ".join(["hpctrain", *words]).startswith(ELSEWHERE):
            continue
        more = [word for key, extra in SHORTER.items() if key in words for word in extra]
        fresh = ["--fresh"] if (newcomer / "runs/wave").exists() and "wave.yaml" in words else []
        codes = None if words[0] == "doctor" else 0  # doctor's code tells of this machine
        hpctrain(*words, *more, *fresh, cwd=newcomer, timeout=250, code=codes, warm=framework(words))
    assert events(newcomer / "runs/wave", "run_finished")[-1]["reason"] == "completed"
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"]["loss"] < 0.05, "sin(x) is learnt"


@pytest.mark.slow
def test_every_command_of_the_page_on_reports(newcomer: Path) -> None:
    hpctrain("train", "wave.yaml", "--train.epochs", 1, cwd=newcomer, warm="torch")
    hpctrain("train", "wave.yaml", "--train.epochs", 1, "--name", "other", cwd=newcomer, warm="torch")
    for words in commands(REPORTS):
        assert hpctrain(*words, cwd=newcomer).stdout
    assert (newcomer / "runs/wave/report.html").exists() and (newcomer / "comparison.html").exists()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_gpt_of_the_page_on_larger_models(newcomer: Path) -> None:
    """On two ranks that share out samples, the layers, and the sequence of layers."""
    shutil.copytree(PROJECT / "docs", newcomer / "docs")
    section = PARALLEL.partition("## A GPT at any plan")[2].partition("\n## ")[0]
    for words in commands(section):
        more = ["--train.steps", 8, "--track.every_steps", 1] if words[0] == "run" else []
        hpctrain(*words, *more, cwd=newcomer, timeout=250, warm="torch")
    names = ("gpt", "gpt-cut", "gpt-stages")
    whole, cut, staged = ([one["loss"] for one in events(newcomer / "runs" / name, "train")] for name in names)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert staged == pytest.approx(whole, rel=1e-5)
    assert len(whole) == 8 and whole[-1] < whole[0] - 0.1
    section = PARALLEL.partition("### How long a step would take")[2].partition("\n## ")[0]
    for words in commands(section):
        more = ["--steps", 12, "--rounds", 1, "--mode", "weak", "--reduce.kind", "mpi"] if words[0] == "bench" else []
        hpctrain(*words, *more, cwd=newcomer, timeout=250, warm="torch")
    plans = json.loads((newcomer / "runs/gpt/plans.json").read_text())["plans"]
    assert len(plans) == 6 and all(one["step_s"] > 0 for one in plans)
    assert "tensor 2 x data 1" in (newcomer / "plans.svg").read_text()
    hpctrain("report", "runs/gpt", cwd=newcomer)
    assert "ms a step, expected" in (newcomer / "runs/gpt/report.html").read_text()


@pytest.mark.slow
def test_the_keras_task_of_the_docs(newcomer: Path) -> None:
    (newcomer / "wave.py").write_text(block(TASKS, "python"))
    hpctrain("train", "wave.yaml", cwd=newcomer, warm="tensorflow")
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"]["loss"] < 0.1


@pytest.mark.slow
def test_the_page_on_fine_tuning(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    text = (PROJECT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    (tmp_path / "adapt.py").write_text(block(text, "python"))
    (tmp_path / "adapt.yaml").write_text(block(text, "yaml"))
    nn = torch.nn
    plain = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    torch.save(plain.state_dict(), tmp_path / "base.pt")
    hpctrain("train", "adapt.yaml", cwd=tmp_path, warm="torch")
    (taken,) = events(tmp_path / "runs/adapt", "initial_weights")
    assert taken["missing"] == ["0.lora_A.weight", "0.lora_B.weight"] and not taken["unexpected"]
    for words in commands(text):
        hpctrain(*words, cwd=tmp_path, warm="torch")
    merged = torch.load(tmp_path / "merged.pt", weights_only=True)
    assert torch.equal(merged["2.weight"], plain.state_dict()["2.weight"]), "frozen"
    assert not torch.equal(merged["0.weight"], plain.state_dict()["0.weight"]), "adapted"
    plain.load_state_dict(merged)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [1, 2], ids=["compiled", "train_step"])
def test_the_models_of_the_docs_that_train_themselves(number: int, newcomer: Path) -> None:
    (newcomer / "wave.py").write_text(block(TASKS, "python", number))
    hpctrain(
        "run", "-n", 2, "wave.yaml", "--train.epochs", 4, "--track.every_steps", 5, cwd=newcomer, warm="tensorflow"
    )
    losses = [event["loss"] for event in events(newcomer / "runs/wave", "train")]
    assert losses[-1] < 0.9 * losses[0]
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"].keys() >= {"loss", ("accuracy", "kl_loss")[number - 1]}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["running", "training"])
def test_the_programs_of_the_api_pages(page: str, newcomer: Path) -> None:
    text = (PROJECT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8")
    (newcomer / "program.py").write_text(block(text, "python"))
    done = run_in_group([*python("torch"), "program.py"], environment(), newcomer, timeout=120)
    assert done.returncode == 0, done.output
    assert events(newcomer / "runs/wave", "run_finished")[-1]["reason"] == "completed"


def test_links_lead_somewhere() -> None:
    for page in [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")), PROJECT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"(?<!\\)\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


def test_the_loops_by_hand_are_as_short_as_promised() -> None:
    for name in ("own_loop_torch.py", "own_loop_keras.py"):
        lines = (PROJECT / "examples" / name).read_text(encoding="utf-8").splitlines()
        assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 40
