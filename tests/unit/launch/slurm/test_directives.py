"""Directives: typed fields in order, the user's changes, what excludes what, and what cannot be a name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.directives import Directive, build, limit_seconds, parse


def names(**slurm: Any) -> list[str]:
    """The directives of a small job, as text."""
    launch = LaunchConfig(nodes=2, ranks_per_node=2, slurm=SlurmConfig(**slurm))
    return [str(directive) for directive in build("r", launch, "logs/%j.out", 30)]


def test_the_order_is_that_of_a_script_people_write():
    found = names(account="a", partition="p", time="01:00:00", memory="4G", gpus_per_node=2, gpu_type="v100")
    assert found == [
        "--job-name=r", "--account=a", "--partition=p", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:v100:2",
        "--mem=4G", "--time=01:00:00", "--signal=B:USR1@30", "--requeue", "--open-mode=append", "--output=logs/%j.out",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "expected"),
    [("gres", "--gres=gpu:4"), ("gpus-per-node", "--gpus-per-node=4"), ("gpus-per-task", "--gpus-per-task=2")],
)
def test_gpus_are_asked_for_in_the_sites_way(request_, expected):
    assert expected in names(gpus_per_node=4, gpu_request=request_)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("4G", "--mem=4G"), ("2G/cpu", "--mem-per-cpu=2G"), ("16G/gpu", "--mem-per-gpu=16G"), ("0", "--mem=0")],
)
def test_memory_is_one_of_three_options(memory, expected):
    assert [word for word in names(memory=memory) if word.startswith("--mem")] == [expected]


@pytest.mark.parametrize("strange", ["a b", "a;b", "$(id)", "`id`", "\u00fc", "a#b"])
@pytest.mark.parametrize("field", ["account", "partition", "licenses", "gpu_type"])
def test_a_strange_name_stays_one_value_which_sbatch_judges(field, strange):
    own, plain = names(gpus_per_node=1, **{field: strange}), names(gpus_per_node=1)
    (line,) = [each for each in own if each not in plain]
    value = re.sub(r"\\(.)", r"\1", line.partition("=")[2].strip('"'))
    assert value in (strange, f"gpu:{strange}:1")


@pytest.mark.parametrize("field", ["comment", "account", "begin", "mail_user"])
@pytest.mark.parametrize("hostile", ["a\nb", "a\0b", "a\x1b[31m", "x" * 5000])
def test_text_without_a_place_in_a_line_is_refused(field, hostile):
    with pytest.raises(UserError, match=f"launch.slurm.{field}"):
        names(**{field: hostile})


@pytest.mark.parametrize(
    "slurm",
    [
        {"memory": "4G", "extra": ("--mem-per-cpu=2G",)},
        {"extra": ("--exclusive", "--oversubscribe")},
        {"extra": ("-s", "--exclusive")},
        {"gpus_per_node": 2, "extra": ("--gpus-per-task=1",)},
        {"extra": ("--no-requeue",)},
        {"cpus_per_rank": 4, "extra": ("--cpus-per-gpu=4",)},
        {"extra": ("--hint=nomultithread", "--threads-per-core=1")},
    ],
)
def test_what_excludes_each_other_is_refused(slurm):
    with pytest.raises(UserError, match="exclude each other"):
        names(**slurm)


def test_twice_the_same_is_refused():
    with pytest.raises(UserError, match="--partition twice"):
        names(partition="a", extra=("-p b",))


def test_skip_and_extra():
    found = names(memory="4G", time="30", skip=("--mem", "--time"), extra=("--time=45", "--nice=100", "-x n7"))
    assert "--time=45" in found and "--time=30" not in found
    assert not any(word.startswith("--mem") for word in found)
    assert found[-2:] == ["--nice=100", "--exclude=n7"]


@pytest.mark.parametrize("slurm", [{"skip": ("--mum",)}])
def test_changing_what_is_not_there_names_the_nearest(slurm):
    with pytest.raises(UserError, match=r"(?s)which the script does not have.*did you mean --mem\?"):
        names(memory="4G", **slurm)


@pytest.mark.parametrize("line", ["--array=1-3", "-d afterok:1", "--signal=USR1@60", "--wrap=id", "--export=NONE"])
def test_what_the_commands_decide_is_no_extra(line):
    with pytest.raises(UserError, match="hpctrain sets itself"):
        names(extra=(line,))


@pytest.mark.parametrize("line", ["mem=4G", "", "--Mem=4G", "-", "--", "--a b\nc", "#SBATCH", "; rm"])
def test_what_is_no_directive_is_refused(line):
    with pytest.raises(UserError):
        names(extra=(line,))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--mem=4G", Directive("--mem", "4G")),
        ("--mem 4G", Directive("--mem", "4G")),
        ("-p long", Directive("--partition", "long")),
        ("-plong", Directive("--partition", "long")),
        ("#SBATCH --exclusive", Directive("--exclusive")),
        ('--comment="two words"', Directive("--comment", "two words")),
    ],
)
def test_directives_are_read_as_people_write_them(line, expected):
    assert parse(line) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
    ],
)
def test_time_limits(limit, expected):
    assert limit_seconds(limit) == expected


def test_a_limit_that_leaves_no_time_before_the_signal_is_refused():
    with pytest.raises(UserError, match="leaves no time"):
        names(time="0:30")


def test_gpus_that_do_not_divide_are_refused():
    launch = LaunchConfig(nodes=1, ranks_per_node=3, slurm=SlurmConfig(gpus_per_node=4, gpu_request="gpus-per-task"))
    with pytest.raises(UserError, match="do not divide"):
        build("r", launch, "x", 30)


def test_every_field_is_used_or_known_to_be_for_other_parts():
    others = {
        "profile", "gpu_request", "cpu_bind", "mpi", "srun_options", "mpirun_options", "wrap", "scratch",
        "max_requeues", "signal_s", "skip", "time_min", "gpu_type", "bad_nodes",
    }  # fmt: skip
    values = {
        "account": "v1", "partition": "v2", "qos": "v3", "constraint": "v4", "reservation": "v5", "licenses": "v6",
        "mail_user": "v7@x", "mail_type": "END", "comment": "v9", "begin": "now+9", "time": "77", "memory": "13G",
        "exclusive": True, "gpus_per_node": 11, "cpus_per_rank": 12, "exclude": ("v14",), "requeue": False,
        "extra": ("--nice=15",),
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(SlurmConfig)} == others | values.keys()
    text = "\n".join(names(**values))
    for value in (
        "v1",
        "v2",
        "v3",
        "v4",
        "v5",
        "v6",
        "v7@x",
        "END",
        "v9",
        "now+9",
        "77",
        "13G",
        "--exclusive",
        ":11",
        "12",
        "v14",
        "--no-requeue",
        "--nice=15",
    ):
        assert value in text


@pytest.mark.parametrize(
    ("launch", "nodes", "survives"),
    [({}, 2, False), ({"spare_nodes": 1}, 3, True), ({"min_nodes": 1}, 2, True), ({"min_nodes": 2}, 2, False)],
)
def test_a_job_that_can_do_without_a_node_survives_its_loss(launch, nodes, survives):
    found = [str(each) for each in build("r", LaunchConfig(nodes=2, ranks_per_node=2, **launch), "logs/%j.out", 30)]
    assert f"--nodes={nodes}" in found and ("--no-kill" in found) is survives


def test_all_resources_of_gres_are_in_one_line_as_slurm_takes_only_the_last():
    found = names(gpus_per_node=1, extra=("--gres=craynetwork:1", "--gres=nvme:2"))
    assert [line for line in found if "gres" in line] == ["--gres=gpu:1,craynetwork:1,nvme:2"]
    with pytest.raises(UserError, match="--gres=gpu twice"):
        names(gpus_per_node=1, extra=("--gres=craynetwork:1,gpu:2",))
