"""The README's task, run file and commands work as written."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain import cli
from tests.support import printed
from tests.support.command import PROJECT, environment, events, hpctrain
from tests.support.warm_ranks import variables

README = (PROJECT / "README.md").read_text(encoding="utf-8")
INDEX = (PROJECT / "docs" / "index.md").read_text(encoding="utf-8")
REPORTS = (PROJECT / "docs" / "reports.md").read_text(encoding="utf-8")
PARALLEL = (PROJECT / "docs" / "parallel.md").read_text(encoding="utf-8")
TASKS = (PROJECT / "docs" / "tasks.md").read_text(encoding="utf-8")
KERAS = (PROJECT / "docs" / "keras.md").read_text(encoding="utf-8")
SHORTER = {
    "submit": ["--dry-run"],
    "step": ["--models", "mlp", "--contenders", "none,plain", "--rounds", "1", "--steps", "2"],
    "parallel": ["--contenders", "one,tensor", "--rounds", "1", "--steps", "1"],
    "recovery": ["--contenders", "hpctrain", "--rounds", "1"],
    "under_kills": ["--contenders", "hpctrain", "--steps", "60"],
}
"""Options added to commands that would take minutes or need a cluster."""
EXAMPLES = {
    "digits-keras.yaml": ["--train.epochs", "1"],
    "chartext.yaml": ["--train.steps", "5"],
    "gan.yaml": ["--train.epochs", "2"],
}
"""Example run files, and options that shorten them."""
TOGETHER_S = 900
"""Limit of tests that run many commands, each of which has a limit of its own."""


def block(text: str, language: str, number: int = 0) -> str:
    """Content of a fenced block of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)[number]


def commands(text: str) -> list[list[str]]:
    """The ``hpctrain`` commands in a page's console blocks."""
    lines = [line for part in re.findall(r"```console\n(.*?)```", text, re.S) for line in part.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("hpctrain ")]


def framework(words: list[str]) -> str:
    """The framework that a command needs."""
    return "tensorflow" if any("keras" in word or word == "tensorflow" for word in words) else "torch"


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A folder with the README's files and the examples."""
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    (tmp_path / "wave.py").write_text(block(README, "python"))
    (tmp_path / "wave.yaml").write_text(block(README, "yaml"))
    shutil.copy(tmp_path / "wave.yaml", tmp_path / "run.yaml")
    return tmp_path


@pytest.mark.tour
@pytest.mark.world_size(4)
@pytest.mark.timeout(TOGETHER_S)
def test_every_command_of_the_readme(newcomer):
    found = commands(README)
    assert len(found) >= 5
    for words in found:
        more = [word for key, extra in SHORTER.items() if key in words for word in extra]
        codes = None if words[0] == "doctor" else 0  # doctor's code depends on this machine
        hpctrain(*words, *more, cwd=newcomer, timeout=250, code=codes, warm=framework(words))
    assert events(newcomer / "runs/demo", "run_finished")[-1]["reason"] == "completed"
    assert len(events(newcomer / "runs/wave", "resumed")) == 1, "the second command continues the first"
    assert events(newcomer / "runs/wave", "run_finished")[-1]["reason"] == "completed"
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"]["loss"] < 0.05, "sin(x) is learnt"


@pytest.mark.world_size(2)
@pytest.mark.timeout(TOGETHER_S)
def test_the_commands_of_the_table_of_figures(newcomer):
    table = README.partition("## How fast")[2].partition("\n## ")[0]
    found = dict.fromkeys(re.findall(r"`((?:hpctrain|python -m benchmarks\.).*?)`", table))
    assert len(found) >= 4
    del found["python -m benchmarks.checkpoint"]  # run by tests/unit/bench/test_checkpoint.py
    for line in found:
        words = shlex.split(line)
        more = next(extra for key, extra in SHORTER.items() if key == words[2].rpartition(".")[2])
        if words[0] == "hpctrain":
            assert hpctrain(*words[1:], *more, cwd=newcomer, timeout=250).stdout
        else:
            command, env = [sys.executable, *words[1:], *more], environment(variables("torch", environment()))
            done = subprocess.run(command, cwd=newcomer, env=env, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0 and done.stdout, done.stderr
            assert "recovery" not in line or "1 of 1" in done.stdout
            assert "under_kills" not in line or done.stdout.endswith("yes\n"), "the same weights"


def test_the_readme_is_one_screen():
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"^- \[", README.partition("## Next")[2], re.M)) <= 4


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run(name, newcomer):
    hpctrain("run", "-n", 2, f"examples/{name}", *EXAMPLES[name], cwd=newcomer, timeout=250, warm=framework([name]))
    assert events(newcomer / "runs" / name.removesuffix(".yaml"), "run_finished")[-1]["reason"] == "completed"


@pytest.mark.world_size(2)
def test_every_command_of_the_landing_page(newcomer):
    program = "import hpctrain\n\nprint(hpctrain.connect().size)\n"
    for name in ("train.py", "horovod_train.py"):
        (newcomer / name).write_text(program)
    hpctrain("train", "examples/digits-torch.yaml", "--train.epochs", 1, cwd=newcomer, warm="torch")
    for words in commands(INDEX):
        code = None if "doctor" in " ".join(words) else 0  # doctor's code depends on this machine
        warm = "torch" if "run.yaml" in words else ""
        words[1:1] = SHORTER.get(words[0], [])  # before a program
        assert hpctrain(*words, cwd=newcomer, timeout=250, code=code, warm=warm).output
    assert events(newcomer / "runs/sharded", "run_finished")[-1]["reason"] == "completed"


def test_commands_about_a_finished_run_in_a_project_of_init(tmp_path):
    """Those of all pages that look at runs/digits or run.yaml; what starts jobs and ranks, or waits, is only parsed."""
    hpctrain("init", "run", cwd=tmp_path)
    hpctrain("train", "run.yaml", "--name", "digits", "--train.epochs", 1, cwd=tmp_path, warm="torch")
    for copy in ("a", "b", "run"):
        shutil.copytree(tmp_path / "runs/digits", tmp_path / "runs" / copy)
    looks = {"ckpt", "evaluate", "predict", "explain", "report", "status", "watch", "logs", "nodes"}
    own = re.compile(r"(?:runs/(?:digits|a)|run\.yaml)$")
    blocks = [one.lines()[0] for one in printed.of_pages() if not one.is_mention]
    found = {tuple(words): words for words in blocks if words[0] in looks and any(map(own.match, words))}
    assert len(found) > 12
    for words in found.values():
        code = 64 if "--clear" in words else 0  # n3 is not excluded
        hpctrain(*words, cwd=tmp_path, code=code, warm="torch")
    assert (tmp_path / "digits.safetensors").exists()
    printed_by_help = re.search("hpctrain (sweep .*)", cli.parser_of("sweep").epilog)
    hpctrain(*printed_by_help[1].split(), "--train.epochs", 1, "--name", "grid", cwd=tmp_path, warm="torch")
    assert len([*tmp_path.glob("runs/grid/[0-3]/checkpoints")]) == 4, "two values of two keys"


def test_every_command_of_the_page_on_reports(newcomer):
    hpctrain("train", "wave.yaml", "--train.epochs", 1, cwd=newcomer, warm="torch")
    hpctrain("train", "wave.yaml", "--train.epochs", 1, "--name", "other", cwd=newcomer, warm="torch")
    for words in commands(REPORTS):
        assert hpctrain(*words, cwd=newcomer).stdout
    assert (newcomer / "runs/wave/report.html").exists() and (newcomer / "comparison.html").exists()


@pytest.mark.world_size(2)
def test_the_gpt_of_the_page_on_larger_models(newcomer):
    """On two ranks that split the samples, each layer, or the sequence of layers."""
    shutil.copytree(PROJECT / "docs", newcomer / "docs")
    section = PARALLEL.partition("## A GPT under any plan")[2].partition("\n## ")[0]
    for words in commands(section):
        more = ["--train.steps", 8, "--track.every_steps", 1] if words[0] == "run" else []
        hpctrain(*words, *more, cwd=newcomer, timeout=250, warm="torch")
    names = ("gpt", "gpt-tensor", "gpt-stages")
    whole, cut, staged = ([one["loss"] for one in events(newcomer / "runs" / name, "train")] for name in names)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert staged == pytest.approx(whole, rel=1e-5)
    assert len(whole) == 8 and whole[-1] < whole[0] - 0.1


@pytest.mark.parametrize("page", [TASKS, KERAS], ids=["torch", "tensorflow"])
def test_the_first_task_of_each_page(page, newcomer, request):
    (newcomer / "wave.py").write_text(block(page, "python"))
    hpctrain("train", "wave.yaml", cwd=newcomer, warm=request.node.callspec.id)
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"]["loss"] < 0.1


def test_the_page_on_fine_tuning(tmp_path):
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


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [1, 2], ids=["compiled", "train_step"])
def test_the_models_of_the_docs_that_train_themselves(number, newcomer):
    (newcomer / "wave.py").write_text(block(KERAS, "python", number))
    hpctrain(
        "run", "-n", 2, "wave.yaml", "--train.epochs", 4, "--track.every_steps", 5, cwd=newcomer, warm="tensorflow"
    )
    losses = [event["loss"] for event in events(newcomer / "runs/wave", "train")]
    assert losses[-1] < 0.9 * losses[0]
    assert events(newcomer / "runs/wave", "eval")[-1]["metrics"].keys() >= {"loss", ("accuracy", "kl_loss")[number - 1]}


def test_links_lead_somewhere():
    targets = []
    for page in [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")), PROJECT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        found = re.findall(r"(?<!\\)\]\(([^)#]+?)(?:#[^)]*)?\)", prose)
        targets += [page.parent / target for target in found if "://" not in target]
    assert len(targets) > 100 and [str(target) for target in targets if not target.exists()] == []


def test_the_loops_by_hand_are_as_short_as_promised():
    for name in ("own_loop_torch.py", "own_loop_keras.py"):
        lines = (PROJECT / "examples" / name).read_text(encoding="utf-8").splitlines()
        assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 40
