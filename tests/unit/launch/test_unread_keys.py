"""Keys of launch that an engine does not read are named."""

import dataclasses
import typing
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.batch_systems import SYSTEMS
from hpctrain.launch.engines.unread_keys import READERS, unread

OTHER = LaunchConfig(
    nodes=2,
    min_nodes=1,
    spare_nodes=1,
    ranks_per_node=2,
    ticket="ticket",
    node_wait_s=5.0,
    remote_shell="rsh {host}",
    launcher="srun",
    env={"A": "b"},
    modules=("cuda",),
    setup=("true",),
    stage_in=("data",),
    stage_environment=True,
    preflight=False,
    max_failures=1,
    stop_grace_s=5.0,
    directives=("-x",),
    slurm=SlurmConfig(partition="p", gpus_per_node=2),
)
OF_SLURM = {"launcher", "stage_in", "stage_environment", "preflight", "slurm.partition"}
OF_SCRIPTS = {"modules", "setup", "directives"}
GPUS, DIALLED = {"slurm.gpus_per_node"}, {"ticket", "node_wait_s"}
UNREAD = {
    "slurm": {"directives", "remote_shell"} | DIALLED,
    **dict.fromkeys(SYSTEMS, OF_SLURM | GPUS | DIALLED | {"remote_shell"}),
    "local": OF_SLURM | OF_SCRIPTS | GPUS | DIALLED | {"remote_shell"},
    "hosts": OF_SLURM | OF_SCRIPTS | GPUS | DIALLED,
    "runners": OF_SLURM | OF_SCRIPTS | GPUS | {"remote_shell"},
}


def test_each_engine_and_each_key_is_known():
    engines = typing.get_args(typing.get_args(typing.get_type_hints(LaunchConfig)["engine"])[0])
    assert set(UNREAD) == set(engines)
    assert {key.partition(".")[0] for key in READERS} <= {field.name for field in dataclasses.fields(LaunchConfig)}


@pytest.mark.parametrize("engine", UNREAD)
def test_keys_that_an_engine_does_not_read(engine):
    assert set(unread(OTHER, engine)) == {f"launch.{key}" for key in UNREAD[engine]}
    assert not list(unread(LaunchConfig(), engine))


@pytest.mark.parametrize("engine", SYSTEMS)
def test_what_an_earlier_start_has_noted_is_not_the_users(engine):
    assert not list(unread(LaunchConfig(remote_shell=SYSTEMS[engine].remote_shell), engine))


@pytest.mark.parametrize(
    ("command", "launch", "said"),
    [
        (["render"], "{directives: [-x]}", "launch.directives: ignored with Slurm"),
        (["submit", "--dry-run"], "{engine: pbs, launcher: srun}", "launch.launcher: ignored with launch.engine: pbs"),
        (["run"], "{engine: pbs, slurm: {qos: q}}", "launch.slurm.qos: ignored with launch.engine: pbs"),
        (["run"], "{hosts: [n1], setup: [x]}", "launch.setup: ignored with launch.hosts"),
    ],
)
def test_they_are_named(
    command,
    launch,
    said,
    tmp_path,
    capsys,
    monkeypatch,
):
    def starts_none(*_):
        raise UserError("no host", "none")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.launch.engines.hosts.run", starts_none)
    Path("run.yaml").write_text(f"name: r\nlaunch: {launch[:-1]}, command: [train]}}\n")
    main([command[0], "run.yaml", *command[1:]])
    assert said in capsys.readouterr().err
