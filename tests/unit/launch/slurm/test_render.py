"""Job scripts: examples that stay in step, sound shell, and values that arrive as they were given."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.loading import load
from hpctrain.config.sections import Config, LaunchConfig, ParallelConfig, SlurmConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.jobs import SubmitOptions
from hpctrain.launch.engines.slurm import profile, render, submission
from hpctrain.run.folder import RunDir

EXAMPLES = Path(__file__).parents[4] / "slurm" / "examples"
HOSTILE = [
    "two words", "it's", 'say "hi"', "$(touch owned)", "`touch owned`", "back\\slash", "semi;touch owned",
    "&& touch owned",
    "| touch owned", "> owned", "# hash", "ünïcödé ☃", "--option", "-n", "*", "~", "{a,b}", "!!", "$HOME",
    "${x:-y}", "%j",
    "'; touch owned; '", '"; touch owned; "', "a=b", "\\", "'", '"', "{{ 7 * 7 }}", "{% raw %}", "(", "&", "",
]  # fmt: skip
SPY = """\
#!{python}
import json, os, sys
json.dump({{"words": sys.argv[1:], "env": dict(os.environ)}}, open({out!r}, "w"))
"""


def config(**launch: object) -> Config:
    """A small training run."""
    return Config(name="r", task="a:b", train=TrainConfig(steps=1, global_batch=1), launch=LaunchConfig(**launch))  # type: ignore[arg-type]


def script(
    run_file: Path = Path("/runs/r/run.yaml"), bin_dir: Path | None = None, array: str | None = None, **launch: object
) -> str:
    """A rendered script."""
    made = config(**launch)
    made = dataclasses.replace(made, launch=profile.resolve(made.launch, Path("/nonexistent")))
    return render.job_script(made, run_file, Path("/runs/r/logs"), bin_dir, 30, array)


def execute(text: str, folder: Path, *words: str) -> dict:  # type: ignore[type-arg]
    """Runs a script with stubbed commands; what hpctrain and module were called with."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("hpctrain", "module"):
        (stubs / name).write_text(SPY.format(python=sys.executable, out=str(folder / f"{name}.json")))
        (stubs / name).chmod(0o755)
    (folder / "job.sh").write_text(text)
    environment = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        "HOME": "/nowhere",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_CPUS_PER_TASK": "5",
    }
    done = subprocess.run(
        ["bash", "job.sh", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "owned").exists(), "a value was executed"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def shellcheck(text: str) -> None:
    """No complaint from bash -n and shellcheck."""
    for command in (["bash", "-n"], [str(Path(sys.executable).parent / "shellcheck"), "--severity=warning", "-"]):
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.stem)
def test_examples_are_what_render_writes(path):
    assert path.read_text() == submission.portable(load(path.with_suffix(".yaml")))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_run_files_are_sound(path):
    shellcheck(submission.portable(load(path)))


def test_a_portable_script_takes_its_run_file(tmp_path):
    called = execute((EXAMPLES / "cpu.sbatch").read_text(), tmp_path, "my run.yaml")
    assert called["hpctrain"]["words"] == ["supervise", "my run.yaml"]
    assert "SRUN_CPUS_PER_TASK" not in called["hpctrain"]["env"], "mpirun's own srun would read it"


def test_a_stop_signal_before_there_is_a_supervisor_does_not_end_the_job(tmp_path):
    text = script(modules=("gcc/12",), setup=("kill -USR1 $$",))
    assert text.index("trap '' USR1") < text.index("module load")
    assert execute(text, tmp_path)["hpctrain"]["words"][0] == "supervise"


def test_what_fails_inside_of_a_sourced_file_does_not_end_the_job(tmp_path):
    profile = tmp_path / "profile.sh"
    profile.write_text("grep -q nothing /dev/null\nexport FOUND=1\n")
    assert execute(script(setup=(f"source {profile}",)), tmp_path)["hpctrain"]["env"]["FOUND"] == "1"


def test_environment_values_arrive_unchanged(tmp_path):
    values = {f"MINE_{number}": value for number, value in enumerate([*HOSTILE, "two\nlines", "tab\there", "\x1b[31m"])}
    text = script(env=values)
    shellcheck(text)
    found = execute(text, tmp_path)["hpctrain"]["env"]
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize("value", [value for value in HOSTILE if value])
def test_paths_and_modules_arrive_unchanged(tmp_path, value):
    run_file = Path("/runs") / value / "run.yaml"
    called = execute(script(run_file, bin_dir=Path("/venv") / value, modules=(value,)), tmp_path)
    assert called["hpctrain"]["words"] == ["supervise", str(run_file)]
    assert called["hpctrain"]["env"]["PATH"].startswith(str(Path("/venv") / value) + ":")
    assert called["module"]["words"] == ["load", value]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_as_an_environment_value(tmp_path, value):
    assert execute(script(env={"MINE": value}), tmp_path)["hpctrain"]["env"]["MINE"] == value


def test_an_array_element_supervises_its_own_run(tmp_path):
    text = script(Path("/runs/my run"), array="0-7%2")
    assert "#SBATCH --array=0-7%2\n" in text and "slurm-%A_%a.out" in text
    assert execute(text, tmp_path)["hpctrain"]["words"] == ["supervise", "/runs/my run/3/run.yaml"]


def test_the_supervisor_knows_how_early_the_signal_comes(tmp_path):
    text = script()
    assert "#SBATCH --signal=B:USR1@30\n" in text
    assert execute(text, tmp_path)["hpctrain"]["env"]["HPCTRAIN_SIGNAL_S"] == "30"


def test_a_failing_line_ends_the_job_and_is_named(tmp_path):
    (tmp_path / "job.sh").write_text(script(setup=("true", "ls /does/not/exist")))
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert "of the job script failed: ls /does/not/exist" in done.stderr


def test_setup_stands_as_it_is():
    lines = ("if true; then", '    export A="$HOME"', "fi")
    assert "\n".join(lines) in script(setup=lines)


@pytest.mark.parametrize("name", ["1A", "A B", "A=B", "", "Ä", "A;touch owned"])
def test_what_cannot_be_a_variable_is_refused(name):
    with pytest.raises(UserError, match=r"launch\.env"):
        script(env={name: "x"})


@pytest.mark.parametrize("run_file", ["/runs/a\nb/run.yaml", "/runs/a\rb/run.yaml", "/runs/\udcff/run.yaml"])
def test_paths_that_no_script_can_hold_are_refused(run_file):
    with pytest.raises(UserError, match="run file contains"):
        script(Path(run_file))


def test_percent_signs_in_the_log_path_are_not_slurms():
    made = config()
    text = render.job_script(made, Path("/r"), Path("/runs/100%j/logs"), None, 30)
    assert "--output=/runs/100%%j/logs/slurm-%j.out" in text


def test_templates_refuse_what_is_not_defined():
    with pytest.raises(jinja2.UndefinedError):
        render.templates().from_string("{{ nothing }}").render()


@pytest.mark.parametrize(
    ("slurm", "step_s", "save_s", "expected"),
    [
        ({"signal_s": 7}, 100.0, 100.0, 7),
        ({"time": "10:00:00"}, None, None, 300),
        ({"time": "00:20:00"}, None, None, 120),
        ({"time": "00:01:00"}, None, None, 30),
        ({"time": "10:00:00"}, 2.0, 30.0, 124),
        ({"time": "00:02:00"}, 2.0, 30.0, 60),
        ({}, None, None, 300),
    ],
)
def test_the_signal_comes_early_enough(slurm, step_s, save_s, expected):  # type: ignore[type-arg]
    assert render.signal_seconds(LaunchConfig(slurm=SlurmConfig(**slurm)), step_s, save_s) == expected


def planned(folder: Path, tensor: int, each: Sequence[dict[str, Any]] = (), **launch: object) -> str:
    """The script of a run, or of an array, whose layers are shared out."""
    made = dataclasses.replace(config(**launch), parallel=ParallelConfig(tensor=tensor), run_dir=str(folder / "run"))
    run = RunDir.of(made.name, made.run_dir)
    places = [str(run.path / str(index)) for index in range(len(each))]
    elements = [dataclasses.replace(made, run_dir=place, **own) for place, own in zip(places, each, strict=True)]
    return submission.plan(made, run, SubmitOptions(elements)).script


def test_ranks_that_share_out_layers_stay_on_a_node(tmp_path):
    script = planned(tmp_path, 2, nodes=2, ranks_per_node=4)
    assert "#SBATCH --distribution=block\n" in script and "#SBATCH --ntasks-per-node=4\n" in script
    assert "--distribution" not in planned(tmp_path, 1, nodes=2, ranks_per_node=4)
    assert "#SBATCH --distribution=block\n" in planned(
        tmp_path, 1, ({"parallel": ParallelConfig(tensor=2)}, {}), ranks_per_node=2
    )


@pytest.mark.parametrize("array", [(), ({"seed": 2},)])
def test_nodes_that_cannot_hold_whole_groups_are_told_before_submission(tmp_path, array):
    """By default a node has a rank for each GPU, or one; what the run file says is looked at when it is read."""
    with pytest.raises(UserError, match=r"is 4, and a node has 6 ranks: ranks that hold parts of a layer"):
        planned(tmp_path, 4, array, nodes=2, slurm=SlurmConfig(gpus_per_node=6))
    with pytest.raises(UserError, match="a node has 1 rank:") as caught:
        planned(tmp_path, 2, array, nodes=2)
    assert "set launch.ranks_per_node to a multiple of 2" in caught.value.fix


def test_the_runs_of_one_array_ask_for_the_same_job(tmp_path):
    with pytest.raises(UserError, match="the same launch settings"):
        planned(tmp_path, 1, ({}, {"launch": LaunchConfig(nodes=2)}))
