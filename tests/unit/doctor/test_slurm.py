"""What the doctor says of a Slurm that does not answer."""

import subprocess

from hpctrain.doctor import slurm


def test_an_sbatch_that_does_not_answer_is_a_problem(tmp_path, monkeypatch):
    def hangs(words, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    (tmp_path / "run.yaml").write_text('name: r\nlaunch: {command: ["true"]}\n')
    monkeypatch.setattr(slurm.client, "find", lambda name: name)
    monkeypatch.setattr(slurm.subprocess, "run", hangs)
    [found] = slurm.script(str(tmp_path / "run.yaml"))
    assert "did not answer" in found.value
