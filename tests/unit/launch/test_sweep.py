"""Points of a sweep: which runs they are, and which folders they have."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hpctrain.commands.jobs import elements_of
from hpctrain.config.loading import dump
from hpctrain.errors import UserError
from hpctrain.launch.sweep import Point, combinations, elements, points_of

FILE = "name: wave\ntask: m:f\noptimizer: {name: adam}\ntrain: {epochs: 2, global_batch: 8}\n"
GRID = ["--optimizer.lr", "1e-3,3e-4", "--seed=0,1"]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    return "run.yaml"


def points(run_file: str, *words: str) -> list[Point]:
    return points_of(run_file, combinations(words))


def keep(points: list[Point]) -> None:
    """As if they had been started."""
    for point in points:
        point.run.create()
        point.run.run_yaml.write_text(dump(point.config))


def folders(points: list[Point]) -> dict[str, str]:
    return {point.label: point.run.path.name for point in points}


def test_values_with_commas_are_combined(run_file):
    found = points(run_file, *GRID, "--train.epochs", "3")
    assert folders(found) == {
        "optimizer.lr 0.001, seed 0": "0",
        "optimizer.lr 0.001, seed 1": "1",
        "optimizer.lr 0.0003, seed 0": "2",
        "optimizer.lr 0.0003, seed 1": "3",
    }
    assert {point.run.path.parent for point in found} == {Path("runs/wave").absolute()}
    assert [point.config.name for point in found] == ["wave-0", "wave-1", "wave-2", "wave-3"]
    assert all(point.config.train.epochs == 3 for point in found)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--optimizer.betas", "[0.9, 0.95],[0.9, 0.99]"], [(0.9, 0.95), (0.9, 0.99)]),
        (["--task_args.sizes=[1,2],3"], [[1, 2], 3]),
        (["--task_args.sizes=[[1,2],[3,4]],[5]"], [[[1, 2], [3, 4]], [5]]),
        (["--task_args.how", "{a: 1, b: 2},x"], [{"a": 1, "b": 2}, "x"]),
        (["--schedule.kind", "cosine,wsd", "--launch.slurm.partition", "a,b"], ["cosine", "wsd"]),
    ],
)
def test_lists_and_mappings_are_one_value(run_file, words, values):
    assert [point.values[0][1] for point in points(run_file, *words)] == values


def test_lines_of_a_file_are_points_too(run_file):
    Path("list").write_text("--train.steps 5\n--seed 3 --optimizer.name sgd\n")
    found = points_of(run_file, combinations(["--optimizer.lr", "0.1,0.2"], ["list"]))
    assert [(p.config.train.steps, p.config.seed, p.config.optimizer.lr) for p in found] == [
        (5, 0, 0.1), (None, 3, 0.1), (5, 0, 0.2), (None, 3, 0.2),
    ]  # fmt: skip


def test_points_keep_their_folders_when_a_sweep_grows_or_runs_on(run_file):
    keep(points(run_file, *GRID))
    longer = points(run_file, *GRID, "--train.epochs", "9")
    assert list(folders(longer).values()) == ["0", "1", "2", "3"]
    more = points(run_file, "--optimizer.lr", "1e-2,1e-3", "--seed", "1,2")
    assert folders(more) == {
        "optimizer.lr 0.01, seed 1": "4",
        "optimizer.lr 0.01, seed 2": "5",
        "optimizer.lr 0.001, seed 1": "1",
        "optimizer.lr 0.001, seed 2": "6",
    }
    narrow = points(run_file, "--optimizer.lr", "3e-4", "--seed", "0,1")
    assert list(folders(narrow).values()) == ["2", "3"], "of the same rate, though it is not swept now"


def test_points_of_another_run_get_other_folders(run_file):
    keep(points(run_file, *GRID))
    seeds = points(run_file, "--seed", "0,1")
    assert not set(folders(seeds).values()) & {"0", "1", "2", "3"}, "with the run file's rate"
    changed = points(run_file, *GRID, "--task_args.width", "7")
    assert not set(folders(changed).values()) & {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--seed", "1,1"], "two points of the sweep are the same: seed 1", "once"),
        (["--seed", "1,2,1"], "two points of the sweep are the same: seed 1", "once"),
        (["--seed", "1,x"], "seed cannot be 'x'", "integer"),
        (["--name", "a,b"], "a sweep has one name", "--name"),
        (["--sed", "1,2"], "unknown option --sed", "--seed"),
    ],
)
def test_what_is_no_sweep_is_refused(run_file, words, what, fix):
    with pytest.raises(UserError, match=what) as caught:
        points(run_file, *words)
    assert fix in caught.value.fix


def test_the_folder_of_a_single_run_is_left_alone(run_file):
    Path("runs/wave/attempts").mkdir(parents=True)
    first = points(run_file, *GRID)[0]
    assert (first.run.path, first.config.name) == (Path("runs/wave-sweep/0").absolute(), "wave-sweep-0")
    there = points(run_file, *GRID, "--run_dir", "runs/wave")[0]
    assert there.run.path == first.run.path
    Path("runs/wave-sweep/attempts").mkdir(parents=True)
    with pytest.raises(UserError, match="is the folder of a single run"):
        points(run_file, *GRID)


def test_a_sweep_stays_where_its_finished_points_are(run_file):
    keep(points(run_file, *GRID))
    Path("runs/wave/attempts").mkdir(parents=True)
    with pytest.raises(UserError, match="is the folder of a single run"):
        points(run_file, *GRID)


def test_an_array_does_not_take_the_folder_of_a_single_run(run_file):
    Path("runs/wave/attempts").mkdir(parents=True)
    with pytest.raises(UserError, match="is the folder of a single run"):
        elements(run_file, [], ["seed=7,8"])


def test_elements_of_an_array_are_points(run_file):
    Path("lines").write_text("# two\n--seed 3 --task_args.of 'a b'\n\n--seed 4  # the second\n")
    found = elements(run_file, ["--launch.slurm.partition", "a,b"], ["optimizer.lr=0.1,0.2", "lines"])
    shown = [(each.optimizer.lr, each.seed, each.task_args.get("of"), each.name) for each in found]
    assert shown == [
        (0.1, 3, "a b", "wave-0"), (0.1, 4, None, "wave-1"), (0.2, 3, "a b", "wave-2"), (0.2, 4, None, "wave-3"),
    ]  # fmt: skip
    assert {each.launch.slurm.partition for each in found} == {"a,b"}
    assert [each.run_dir for each in elements(run_file, [], ["seed=7"])] == [str(Path("runs/wave/0").absolute())]
    assert elements(run_file, [], []) == []


def test_elements_of_a_moved_array_are_in_its_folder(tmp_path):
    (moved := tmp_path / "moved").mkdir()
    (moved / "run.yaml").write_text(f"name: wave\nrun_dir: {tmp_path}/gone\nlaunch: {{command: [sh]}}\n")
    for overrides, folder in ([], "moved"), ([f"--run_dir={tmp_path}/other"], "other"):
        found = elements_of(argparse.Namespace(target=str(moved), overrides=overrides, array=["seed=1,2"]))
        assert [each.run_dir for each in found] == [f"{tmp_path}/{folder}/{index}" for index in (0, 1)]


def test_a_long_list_of_values_is_no_file(run_file):
    seeds = ",".join(map(str, range(150)))
    assert len(elements(run_file, [], [f"seed={seeds}"])) == 150


@pytest.mark.parametrize(
    ("text", "what"),
    [(None, "No such file"), ("--name 'a\n", "No closing quotation"), ("# nothing\n", "names no runs")],
)
def test_files_of_no_runs_are_refused(run_file, text, what):
    if text is not None:
        Path("list").write_text(text)
    with pytest.raises(UserError, match=what):
        combinations([], ["list"])
