"""Bad input on two ranks ends with one clear message, printed once, and the right exit code."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from tests.dist.programs import launch_task
from tests.support.command import (
    HPCTRAIN,
    assert_explained,
    endings,
    environment,
    events,
    hpctrain,
    misbehaving_run,
    reaches_step,
    refused,
    started,
    wait_for,
    write_run,
)
from tests.support.mpi import LAUNCH_S, PATIENCE_S, Result, rank_environment, run_in_group
from tests.support.warm_ranks import variables
from tests.tasks import combined_tasks

pytestmark = pytest.mark.world_size(2)
run_on_two = functools.partial(hpctrain, "run", "-n", 2, code=None, warm="torch")


@pytest.mark.tour
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("trian: {steps: 3}", ["unknown key 'trian'", "did you mean train?", "run.yaml:"]),
        ("seed: many", ["seed cannot be 'many'"]),
        ("schedule: {kind: zigzag}", ["zigzag"]),
    ],
)
def test_a_wrong_run_file(tmp_path, line, parts):
    path = misbehaving_run(tmp_path)
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in json.loads(path.read_text()).items())
    path.write_text(f"{text}\n{line}\n")
    refused(run_on_two(path), 64, *parts)
    assert not (tmp_path / "run").exists()


def test_a_run_file_that_is_not_there(tmp_path):
    refused(run_on_two(tmp_path / "no.yaml"), 64, "does not exist")


def test_wrong_words_under_plain_mpirun_are_said_once(tmp_path, mpirun):
    path = misbehaving_run(tmp_path)
    result = mpirun(2, "hpctrain", "train", path, "--trian.steps", "3", check=False)
    assert result.stderr.count("unknown option --trian.steps") == 1, result.output
    assert "did you mean --train.steps?" in result.stderr
    assert "Traceback" not in result.output


def test_wrong_data(tmp_path):
    launch_task.ragged(tmp_path / "data.h5")
    result = run_on_two(misbehaving_run(tmp_path, task_args={"data": str(tmp_path / "data.h5")}))
    refused(result, 64, "data.h5", "8", "7")
    assert endings(tmp_path / "run") == ["failed", "failed"]
    assert_explained(tmp_path / "run", "user_error", "data.h5")


def test_what_does_not_go_together_on_several_ranks_is_said_once(tmp_path):
    path = write_run(
        tmp_path,
        task=f"{combined_tasks.__file__}:task",
        task_args={"uses": ["JOINT_LAYERS"]},
        run_dir=str(tmp_path / "run"),
        train={"steps": 1, "global_batch": 8, "compile": True},
    )
    result = run_on_two(path)
    refused(result, 64, "train.compile is true, and a layer of the model normalises over all ranks", "plain BatchNorm")
    assert endings(tmp_path / "run") == ["failed", "failed"]


def test_a_dataset_that_the_task_wants_is_missing(tmp_path):
    launch_task.without_targets(tmp_path / "data.h5")
    result = run_on_two(misbehaving_run(tmp_path, task_args={"data": str(tmp_path / "data.h5")}))
    assert result.returncode in (64, 70), result.output
    assert "'y'" in result.stderr
    assert result.stderr.count("hpctrain: ") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_weights_that_are_not_numbers_are_not_saved(tmp_path, mode):
    """At step 4 the loss is finite, but the gradient on rank 1 is not; a checkpoint is due after every step."""
    path = misbehaving_run(tmp_path, "nan-gradient", checkpoint={"every_steps": 1, "mode": mode}, train={"steps": 4})
    result = run_on_two(path)
    refused(result, 76, "the checkpoint of step 4 was not written", "rank 0: model/weight is not finite")
    loaded = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    assert loaded.step < 4 and all(np.isfinite(array).all() for array in loaded.arrays.values())


def test_a_step_that_raises_under_plain_mpirun(tmp_path, mpirun):
    forked = variables("torch", environment())
    result = mpirun(2, "hpctrain", "train", misbehaving_run(tmp_path, "raise"), env=forked, check=False)
    assert result.returncode != 0
    assert result.stderr.count("ValueError: bad sample") == 1, result.output
    assert "Traceback" not in result.output


def test_a_task_whose_module_is_missing(tmp_path):
    (tmp_path / "wrong.py").write_text("import no_such_module\n")
    refused(run_on_two(misbehaving_run(tmp_path), "--task", tmp_path / "wrong.py:task"), 64, "no_such_module")


BLOCK_HOROVOD = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def test_horovod_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK_HOROVOD)
    path = misbehaving_run(tmp_path, reduce={"kind": "horovod"})
    result = run_on_two(path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"})
    refused(result, 64, "Horovod is not installed", "hpctrain install-horovod")
    assert_explained(tmp_path / "run", "horovod", "install-horovod")


def test_horovod_uses_another_mpi_library(tmp_path):
    from hpctrain.launch.mpi_library import probe

    copy = tmp_path / "other" / Path(probe().path).name
    copy.parent.mkdir()
    shutil.copy(probe().path, copy)
    path = misbehaving_run(tmp_path, "second-mpi", reduce={"kind": "horovod"}, task_args={"library": str(copy)})
    refused(run_on_two(path), 64, "different MPI libraries", str(copy))


def test_ranks_that_do_not_find_each_other(tmp_path):
    result = hpctrain("train", misbehaving_run(tmp_path), env={"HPCTRAIN_EXPECTED_RANKS": "2"}, code=64)
    refused(result, 64, "started 2 ranks but MPI sees 1")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_in_use(tmp_path):
    path = misbehaving_run(tmp_path, train={"steps": 1000}, track={"every_steps": 1})
    with started("run", "-n", 2, path, env={"STEP_S": "0.2"}) as first:
        wait_for("step", reaches_step(tmp_path / "run", 2))
        refused(run_on_two(path), 64, "in use by another live run", f"process {first.pid} on ")
        refused(hpctrain("train", path, code=64), 64, "in use by another live run")
        step = events(tmp_path / "run", "train")[-1]["step"]
        wait_for("further step", reaches_step(tmp_path / "run", step + 2))
        first.terminate()
        first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 75
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]) == 1


def run_on_a_disk_that_fills(folder: Path, **sections: object) -> Result:
    """Run two ranks with a run folder on a small separate file system that is full from the fourth step on."""
    mounted = folder / "run"
    mounted.mkdir()
    path = misbehaving_run(
        folder, "fill", train={"steps": 300}, task_args={"rank": 0}, track={"every_steps": 1}, **sections
    )
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("not permitted here: a mount namespace")
    script = 'mount -t tmpfs -o size=4M tmpfs "$1" && shift && "$@"; code=$?; tail "$RUN/events.jsonl"'
    script += '; rm -f "$RUN/filler"; hpctrain explain "$RUN" --json; exit $code'
    words_ = [*apart, "bash", "-c", script, "bash", str(mounted), *HPCTRAIN, "run", "-n", "2", str(path)]
    return run_in_group(words_, rank_environment({"RUN": str(mounted)}), None, LAUNCH_S)


def test_a_disk_that_is_full_when_events_are_written_costs_the_events_not_the_run(tmp_path):
    result = run_on_a_disk_that_fills(tmp_path, checkpoint={"enabled": False})
    assert result.returncode == 0, result.output
    assert result.output.count("events.jsonl cannot be written: No space left on device; training continues") == 1
    assert re.search("events of this run that are lost: 2[0-9][0-9]", result.output), result.output
    assert "completed at step 300" in result.stdout and '"event": "train"' in result.stdout
    assert "Traceback" not in result.output


def test_a_disk_that_is_full_when_the_end_is_saved_fails_the_run(tmp_path):
    result = run_on_a_disk_that_fills(tmp_path, checkpoint={"every_steps": 100})
    assert result.returncode == 70, result.output
    assert result.stdout.count("FAILED: rank 0: ") >= 2 and "older checkpoints are intact" in result.stdout
    assert "the checkpoint of step 300 was not written" in result.stderr and "free space" in result.stderr
    assert '"cause": "disk_full"' in result.stdout
    assert "Traceback" not in result.output


def test_more_ranks_than_samples_of_a_batch(tmp_path):
    refused(run_on_two(misbehaving_run(tmp_path, train={"global_batch": 1})), 64, "global_batch is 1")


def test_no_mpi_for_several_ranks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK_HOROVOD.replace("horovod", "mpi4py"))
    result = run_on_two(misbehaving_run(tmp_path), env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"})
    refused(result, 64, "mpi4py is not installed", 'pip install "hpctrain[mpi]"')


def test_help_and_errors_need_no_heavy_library(tmp_path):
    code = "import sys, hpctrain.cli as c; c.main(['run', 'no.yaml']); print(*{'torch', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == ""
