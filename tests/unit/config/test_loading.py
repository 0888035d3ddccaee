"""Run files: what they accept, what they refuse, and what they say then."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.loading import dump, load
from hpctrain.config.sections import Config, Decisive, LaunchConfig, NotNegative, Section, TrainConfig, WrongValue
from hpctrain.errors import ExitCode, UserError
from tests.support.docs_tables import key_tables

MINIMAL = "name: a\ntask: pkg.mod:make\ntrain: {epochs: 3, global_batch: 64}\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refused(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == ExitCode.USER_ERROR
    return caught.value


def test_defaults_and_overrides(run_file):
    words = ["--train.epochs", "7", "--reduce.overlap=off", "--task_args.lr", "1e-3", "--train.early_stop.patience=9"]
    config = load(run_file, words)
    assert config.train.epochs == 7
    assert config.train.global_batch == 64
    assert config.reduce.overlap == "off"
    assert config.task_args == {"lr": 1e-3}
    assert config.train.early_stop.patience == 9


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("train.batch_size", "did you mean --train.batch_per_rank?"),
        ("launch.slurm.gpus", "did you mean --launch.slurm.gpus_per_node?"),
        ("launch.slurm.dependency", "launch.slurm.extra takes further directives"),
        ("launch.slurm.gres", "launch.slurm.extra takes further directives"),
    ],
)
def test_keys_of_other_programs_lead_to_ours(run_file, key, fix):
    with pytest.raises(UserError, match="unknown option") as caught:
        load(run_file, [f"--{key}", "3"])
    assert caught.value.fix == fix


def test_arguments_of_the_task_are_given_together_or_one_by_one(run_file):
    run_file.write_text(MINIMAL + "task_args: {a: 1, b: 2}\n")
    assert load(run_file, ["--task_args.b", "[3]", "--task_args", "{c: x}"]).task_args == {"a": 1, "b": [3], "c": "x"}


def test_a_required_key_that_is_missing_is_named(run_file):
    run_file.write_text("task: m:f\n")
    error = refused(run_file)
    assert (error.what, error.fix) == ("name is missing", "give text")


@pytest.mark.parametrize(
    ("line", "fix"),
    [("epochs: four", "an integer"), ("clip_norm: x", "a number"), ("recompute: 1", "a list of text: [1]")],
)
def test_what_to_give_is_a_sentence(run_file, line, fix):
    run_file.write_text(f"name: x\ntask: m:f\ntrain: {{{line}}}\n")
    assert refused(run_file).fix == f"give {fix}"


@pytest.mark.parametrize(("key", "near"), [("train.seed", "seed"), ("train.every_epochs", "checkpoint.every_epochs")])
def test_a_key_in_the_wrong_section_is_found_by_its_name(run_file, key, near):
    section, _, name = key.partition(".")
    run_file.write_text(f"name: x\ntask: m:f\n{section}: {{{name}: 1}}\n")
    assert refused(run_file).fix == f"did you mean {near}?"


def test_scalars_are_read_as_yaml_1_2(run_file):
    run_file.write_text(
        MINIMAL + "reduce: {overlap: off}\nlaunch: {slurm: {time: 01:30:00}}\n"
        'task_args: {lr: 1e-3, a: "017", b: 017, c: yes, d: 0x1F, e: .5, f: , g: [1, true]}\n'
    )
    config = load(run_file)
    assert config.reduce.overlap == "off"
    assert config.launch.slurm.time == "01:30:00"
    expected = {"lr": 1e-3, "a": "017", "b": "017", "c": "yes", "d": 31, "e": 0.5, "f": None, "g": [1, True]}
    assert config.task_args == expected


@pytest.mark.parametrize("text", ["null", "~", "Null", "NULL"])
def test_quoted_text_is_text(run_file, text):
    run_file.write_text(MINIMAL + f'run_dir: "{text}"\nlaunch: {{slurm: {{qos: "{text}", account: {text}}}}}\n')
    config = load(run_file)
    assert (config.run_dir, config.launch.slurm.qos, config.launch.slurm.account) == (text, text, None)
    run_file.write_text(dump(config))
    assert load(run_file) == config
    assert load(run_file, ["--run_dir", "null"]).run_dir is None, "an option wins"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("data: {globl: 3}", "run.yaml:4: unknown key 'data.globl'", "configuration.md"),
        ("reduce: {compresion: fp16}", "run.yaml:4: unknown key 'reduce.compresion'", "reduce.compression"),
        ("sed: 3", "unknown key 'sed'", "seed"),
        ("parallel: {shard_within: node}", "parallel.shard_within is node, and parallel.shard is none", "leave it out"),
        ("seed: null", "run.yaml:4: seed cannot be 'null'", "integer"),
        ("task_args: [1]", "run.yaml:4: task_args cannot be '[1]'", "mapping"),
        ("task_args: {1: a}", "run.yaml:4: task_args cannot be '1'", "mapping"),
        ("launch: {env: {A: 1.5}}", "run.yaml:4: launch.env cannot be '1.5'", "mapping"),
        ("schedule: {step_epochs: [1, a]}", "run.yaml:4: schedule.step_epochs cannot be 'a'", "list of integer"),
        ("schedule: {kind: step}", "run.yaml:4: schedule.kind is step but schedule.step_epochs is empty", "[30, 60]"),
        (
            "schedule: {warmup_steps: 1, warmup_epochs: 1}",
            "run.yaml:4: schedule.warmup_steps and",
            "one of schedule.warmup_steps",
        ),
        (
            "schedule: {warmup_steps: 1, kind: one_cycle}",
            "run.yaml:4: schedule.kind is one_cycle, which",
            "climb_share",
        ),
        ("reduce: {compression: bf16, kind: horovod}", "run.yaml:4: Horovod cannot sum bfloat16", "fp16"),
        ("data: {drop_last: 3}", "run.yaml:4: data.drop_last cannot be '3'", "true or false"),
        ("reduce: {kind: foo}", "run.yaml:4: reduce.kind cannot be 'foo'", "auto, horovod, mpi, nccl, none"),
        ("schedule: 3", "run.yaml:4: schedule cannot be '3'", "mapping"),
        ("schedule: {step_epochs: 5}", "run.yaml:4: schedule.step_epochs cannot be '5'", "list of integer: [5]"),
        ("seed: -1", "run.yaml:4: seed is -1", "0 or more"),
        ("seed: 18446744073709551616", "run.yaml:4: seed is 18446744073709551616", "18446744073709551615 or less"),
        ("schedule: {warmup_epochs: .nan}", "run.yaml:4: schedule.warmup_epochs is nan", "0 or more"),
        ("schedule: {warmup_epochs: .inf}", "run.yaml:4: schedule.warmup_epochs is inf", "1000000 or less"),
        ("checkpoint: {every_minutes: .nan}", "run.yaml:4: checkpoint.every_minutes is nan", "above 0"),
        ("checkpoint:\n  keep_last: 0", "run.yaml:5: checkpoint.keep_last is 0", "1 or more"),
        ("train: {epochs: 4}", "'train' is in line 3 already", "one of the two"),
        (
            "task_args:\n  lr: 0.1\n  steps: {a: 1}\n  lr: 0.2",
            "run.yaml:7 is not YAML: 'lr' is in line 5 already",
            "correct",
        ),
        ("task_args: {a: {b: 1, b: 1}}", "'b' is in line 4 already", "correct"),
        ("data: [", "run.yaml:5 is not YAML", "indentation"),
        ("optimizer: {lr: 1}", "run.yaml:4: optimizer.lr is given without optimizer.name", "sgd, adam, adamw, nadam"),
        ("optimizer: {name: adm}", "run.yaml:4: optimizer.name cannot be 'adm'", "sgd, adam, adamw, nadam, adamax"),
        ("optimizer: {name: sgd, betas: [0.9, 0.9]}", "optimizer sgd has no betas", "takes lr, weight_decay, momentum"),
        ("optimizer: {name: adam, beta: 1}", "unknown key 'optimizer.beta'", "optimizer.betas"),
        ("optimizer: {name: adam, betas: [0.9]}", "optimizer.betas is [0.9]", "two numbers"),
        ("optimizer: {name: adamw, lr: -1}", "run.yaml:4: optimizer.lr is -1", "0 or more"),
        ("optimizer: {name: sgd, nesterov: true}", "without optimizer.momentum", "such as 0.9"),
        ("launch: {command: [ls]}", "task and launch.command are both given", "launch.command"),
    ],
)
def test_wrong_files_name_line_key_and_cure(run_file, line, what, fix):
    run_file.write_text(MINIMAL + line + "\n")
    error = refused(run_file)
    assert what in error.what
    assert fix in error.fix


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--train.epoch", "3"], "unknown option --train.epoch", "--train.epochs"),
        (["--epochs", "3"], "unknown option --epochs", "--train.epochs"),
        (["--train.epochs", "x"], "train.epochs cannot be 'x'", "integer"),
        (["--train.epochs"], "train.epochs needs a value", "integer"),
        (["--train.epochs", "--name=b"], "train.epochs needs a value", "integer"),
        (["--train.early_stop", "{}"], "unknown option --train.early_stop", "--train.early_stop.mode"),
        (["--task_args.", "5"], "unknown option --task_args.", "--task_args"),
        (["more"], "'more' is not an option", "--key value"),
        (["--task_args.optimizer.lr", "5"], "--task_args.optimizer.lr names a part", "--task_args.optimizer '{...}'"),
        (["--train.steps", "5", "--train.epochs", "2"], "train.epochs and train.steps are both given", "exactly one"),
        (["--train.global_batch", "0"], "train.global_batch is 0", "1 or more"),
    ],
)
def test_wrong_overrides(run_file, words, what, fix):
    error = refused(run_file, *words)
    assert what in error.what
    assert fix in error.fix
    assert "run.yaml:" not in error.what, "an override has no line in the file"


@pytest.mark.parametrize(
    ("line", "words", "gone", "said"),
    [
        ("", ["--train.steps", "5"], "train.epochs", "--train.steps overrides train.epochs in "),
        ("", ["--train.batch_per_rank=2"], "train.global_batch", "--train.batch_per_rank overrides train.glo"),
        ("", ["--launch.command", "[ls]"], "task", "--launch.command overrides task in "),
        (
            "schedule: {warmup_epochs: 2}",
            ["--schedule.warmup_steps", "0"],
            "schedule.warmup_epochs",
            "--schedule.warmup_steps overrides schedule.warmup_epochs in ",
        ),
    ],
)
def test_of_two_keys_that_exclude_each_other_the_command_lines_wins_and_it_is_said(run_file, line, words, gone, said):
    run_file.write_text(f"{MINIMAL}{line}\n")
    heard: list[str] = []
    config = load(run_file, words, heard.append)
    assert not operator.attrgetter(gone)(config)
    assert len(heard) == 1
    assert heard[0].startswith(said)
    assert load(run_file, [*words, f"--{gone}", "" if gone == "task" else "null"]) == config, "taken back by hand"


def test_nothing_is_said_where_nothing_gives_way(run_file):
    heard: list[str] = []
    load(run_file, ["--train.epochs", "5", "--train.global_batch", "8"], heard.append)
    assert not heard


@pytest.mark.parametrize(
    "line",
    [
        "track: {mlflow: 'https://user:hunter2@server'}",
        "track: {mlflow: 'postgresql+psycopg2://user:hunt/er2@server/db'}",
        "track: {mlflow: 'https://hunter2@server'}",
        "checkpoint: {tiers: {store: {url: 's3://key:hunter2@bucket/x'}}}",
        "checkpoint: {tiers: {store: {url: {at: 's3://key:hunter2@bucket/x'}}}}",
        "checkpoint: {init_from: 'https://server/x?X-Amz-Date=1&X-Amz-Signature=hunter2'}",
        "task_args: {data: ['https://account/x?sv=2&sig=hunter2']}",
        "task_args: {data: {train: 'https://server/x?%74oken=hunter2'}}",
        "launch: {stage_in: ['https://server/x?AWSAccessKeyId=hunter2']}",
    ],
)
def test_credentials_in_addresses_are_refused_and_not_repeated(line, run_file, cli):
    run_file.write_text(f"{MINIMAL}{line}\n")
    before = sorted(run_file.parent.iterdir())
    said = "".join(cli("run", run_file, code=64))
    assert line.partition(":")[0] in said and "contains credentials" in said
    assert "hunt" not in said and sorted(run_file.parent.iterdir()) == before


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:9000/x@3",
        "s3://bucket/table@12",
        "abfss://container@account.dfs.core.windows.net/table",
        "postgresql://somebody@server/db",
        "s3://bucket/a:b/x@1?region=eu&page=2",
        "token=1, sig=2",
    ],
)
def test_addresses_without_credentials_are_taken(address):
    Config("digits", "digits.py:task", TrainConfig(epochs=1, global_batch=1), task_args={"data": [address]})


def test_the_environment_of_ranks_may_hold_secrets():
    proxy = {"HTTPS_PROXY": "http://user:secret@proxy"}
    Config("digits", "digits.py:task", TrainConfig(epochs=1, global_batch=1), launch=LaunchConfig(env=proxy))


def test_missing_file(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.yaml").what


def test_a_program_in_place_of_a_run_file(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    error = refused(tmp_path / "train.py")
    assert "is a Python program" in error.what
    assert f"hpctrain run -- python {tmp_path}/train.py" in error.fix


def test_nothing_is_constructed_from_yaml_tags(run_file):
    run_file.write_text(MINIMAL + "task_args: {x: !!python/object/apply:os.getcwd []}\n")
    refused(run_file)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1), scalars | st.lists(scalars, max_size=3), max_size=4))
def test_dump_is_read_back_equal(tmp_path_factory, task_args):
    config = Config(name="a", task="m:f", train=TrainConfig(steps=3, batch_per_rank=2), task_args=task_args)
    path = tmp_path_factory.mktemp("dump") / "run.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_a_number_or_a_word(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\ntask: m:f\ntrain: {steps: 3, global_batch: 2}\n")
    key = "--checkpoint.tiers.memory.every_steps"
    found = [load(path, [key, word]).checkpoint.tiers.memory.every_steps for word in ("auto", "50", "null")]
    assert found == ["auto", 50, None]
    with pytest.raises(UserError, match="integer or auto"):
        load(path, [key, "often"])


def test_the_reference_page_is_in_step():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert key_tables() in page.read_text(encoding="utf-8"), "python -m tests.support.docs_tables keys prints the table"


def test_accept_adds_to_what_a_resume_accepts(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\ntask: m:f\ntrain: {steps: 3, global_batch: 2}\n")
    words = ["--accept", "train.epochs", "--accept=task_args.lr"]
    assert load(path, words).checkpoint.accept == ("train.epochs", "task_args.lr")
    for known in ("schedule", "task_args", "state", "state.replay", "optimizer.options.betas"):
        load(path, ["--accept", known])
    with pytest.raises(UserError, match=r"checkpoint.accept names 'tain.epochs', which is not a key") as caught:
        load(path, ["--accept", "tain.epochs"])
    assert caught.value.fix == "did you mean train.epochs?"
    with pytest.raises(UserError, match="accept needs a value"):
        load(path, ["--accept"])


def test_a_key_says_itself_that_results_depend_on_it():
    class Noise(Section, key="train.noise"):
        deviation: Decisive[NotNegative | None] = None
        places: tuple[str, ...] = ()

    assert Noise._decisive == ("train.noise.deviation",)
    with pytest.raises(WrongValue, match=r"train\.noise\.deviation is -1"):
        Noise(deviation=-1.0)
