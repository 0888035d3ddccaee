"""Which changes of a run file a resumed run may have."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hpctrain.checkpoint.resume_compat import config_hash, differences, identity_of, refuse_changes
from hpctrain.config.sections import DECISIVE as DECISIVE_KEYS
from hpctrain.config.sections import (
    CheckpointConfig,
    Config,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrackConfig,
    TrainConfig,
)
from hpctrain.errors import UserError

BASE = Config(
    name="run", task="m:t", train=TrainConfig(epochs=3, batch_per_rank=16), task_args={"lr": 0.1, "sizes": [1, 2]}
)


def identity(config: Config, ranks: int = 4, data: str = "abc") -> dict[str, Any]:
    per_rank = config.train.batch_per_rank
    batch = per_rank * ranks if per_rank else config.train.global_batch
    return json.loads(json.dumps({"config": dataclasses.asdict(config), "global_batch": batch, "data": data}))


def change(**sections: Any) -> Config:
    return dataclasses.replace(BASE, **sections)


def test_numbers_that_json_does_not_know_are_compared_by_that():
    values = {"task_args": {"limit": float("inf"), "rates": (0.5, float("nan"))}}
    assert identity_of(values, 8, "abc")["config"] == {
        "task_args": {"limit": "not finite", "rates": [0.5, "not finite"]}
    }


HARMLESS = {
    "name": change(name="other"),
    "folder": change(run_dir="/elsewhere"),
    "tracking": change(track=TrackConfig(every_steps=1, tensorboard=True)),
    "monitor": change(monitor=MonitorConfig(enabled=False)),
    "checkpoints": change(checkpoint=CheckpointConfig(every_steps=5, keep_last=9)),
    "longer": change(train=TrainConfig(epochs=9, batch_per_rank=16)),
    "evaluation": change(train=TrainConfig(epochs=3, batch_per_rank=16, eval_every_steps=7)),
    "same batch, said otherwise": change(train=TrainConfig(epochs=3, global_batch=64)),
}
DECISIVE = {
    "seed": change(seed=1),
    "task": change(task="m:other"),
    "task_args.lr": change(task_args={"lr": 0.2, "sizes": [1, 2]}),
    "task_args.sizes": change(task_args={"lr": 0.1, "sizes": [1, 3]}),
    "train.precision": change(train=TrainConfig(epochs=3, batch_per_rank=16, precision="bf16")),
    "train.clip_norm": change(train=TrainConfig(epochs=3, batch_per_rank=16, clip_norm=1.0)),
    "global batch": change(train=TrainConfig(epochs=3, batch_per_rank=8)),
    "optimizer.lr": change(optimizer=OptimizerConfig("adam", lr=0.1)),
    "schedule.kind": change(schedule=ScheduleConfig(kind="cosine")),
}


@pytest.mark.parametrize("key", [key for key in DECISIVE_KEYS if "." in key])
def test_an_earlier_version_that_lacks_a_key_computed_what_its_default_does(key):
    before, (section, _, name) = identity(BASE), key.partition(".")
    del before["config"][section][name]
    refuse_changes(before, identity(BASE), "here")
    assert config_hash(before) == config_hash(identity(BASE))


@pytest.mark.parametrize("config", HARMLESS.values(), ids=HARMLESS)
def test_harmless(config):
    refuse_changes(identity(BASE), identity(config), "here")
    now = identity(config)
    turned = now | {"config": dict(reversed(now["config"].items()))}
    assert config_hash(identity(BASE)) == config_hash(now) == config_hash(turned)


@pytest.mark.parametrize(("key", "config"), DECISIVE.items(), ids=DECISIVE)
def test_decisive(key, config):
    assert key in [found for found, _, _ in differences(identity(BASE), identity(config))]
    with pytest.raises(UserError, match=key):
        refuse_changes(identity(BASE), identity(config), "here")
    assert config_hash(identity(BASE)) != config_hash(identity(config))


def test_a_first_argument_of_the_task_is_one_difference():
    """It was two, one of them that of an empty mapping."""
    with pytest.raises(UserError, match=r"task_args\.lr was not given and is 0\.1") as refused:
        refuse_changes(identity(change(task_args={})), identity(change(task_args={"lr": 0.1})), "here")
    assert refused.value.fix.endswith(" --accept task_args.lr") and refused.value.fix.count("--accept") == 1


def test_a_file_of_the_task_may_be_named_by_its_full_path():
    here, job = change(task="wave.py:task"), change(task="/home/me/wave.py:task")
    refuse_changes(identity(here), identity(job), "here")
    for other in ("/home/me/other.py:task", "/home/me/wave.py:other", "wave:task"):
        with pytest.raises(UserError, match="task was"):
            refuse_changes(identity(here), identity(change(task=other)), "here")


def test_other_data():
    before, after = "1a2b3c4d" * 8, "5e6f7a8b" * 8
    table, rewritten = f"s3://bucket/rows {before[:16]}", f"s3://bucket/rows {after[:16]}"
    with pytest.raises(UserError, match=r"training data has changed \(checksum 1a2b3c4d, now 5e6f7a8b\)"):
        refuse_changes(identity(BASE, data=table), identity(BASE, data=rewritten), "here")
    for now, told in ((after, "checksum 1a2b3c4d, now 5e6f7a8b"), (f"{before} sampler {after}", "its sampler")):
        with pytest.raises(UserError, match=r"training data has changed \(.*" + told):
            refuse_changes(identity(BASE, data=before), identity(BASE, data=now), "here")


def test_length_matters_to_a_schedule_that_ends():
    short = change(schedule=ScheduleConfig(kind="cosine"))
    longer = dataclasses.replace(short, train=TrainConfig(epochs=9, batch_per_rank=16))
    with pytest.raises(
        UserError, match=r"train\.epochs was 3 and is 9 \(schedule\.kind cosine depends on the run's length"
    ) as caught:
        refuse_changes(identity(short), identity(longer), "here")
    assert "--accept train.epochs" in caught.value.fix
    endless = dataclasses.replace(longer, schedule=ScheduleConfig(kind="restarts", cycle_epochs=2))
    refuse_changes(identity(dataclasses.replace(endless, train=short.train)), identity(endless), "here")


def accepting(config: Config, *keys: str) -> Config:
    return dataclasses.replace(config, checkpoint=CheckpointConfig(accept=keys))


def test_what_is_accepted_may_differ():
    short = change(schedule=ScheduleConfig(kind="cosine"))
    longer = dataclasses.replace(short, train=TrainConfig(epochs=9, batch_per_rank=16))
    in_steps = dataclasses.replace(short, train=TrainConfig(steps=900, batch_per_rank=16))
    for config in (longer, in_steps):
        for key in ("train.epochs", "train.steps", "train"):
            refuse_changes(identity(short), identity(accepting(config, key)), "here")
        with pytest.raises(UserError, match=r"train\.epochs was 3"):
            refuse_changes(identity(short), identity(accepting(config, "schedule", "train.ep")), "here")
    both = accepting(dataclasses.replace(longer, seed=1), "train.epochs")
    with pytest.raises(UserError, match=r"differs from that of here: seed was 0 and is 1\n") as caught:
        refuse_changes(identity(short), identity(both), "here")
    assert caught.value.fix.endswith("--accept seed")


def test_other_data_cannot_be_accepted():
    anything = accepting(BASE, "training data", "global batch")
    with pytest.raises(UserError, match="training data") as caught:
        refuse_changes(identity(BASE), identity(anything, data="xyz"), "here")
    assert "--accept" not in caught.value.fix


def test_keys_that_an_earlier_version_lacked_are_as_they_were():
    saved = identity(change(schedule=ScheduleConfig(kind="step", step_epochs=(2,))))
    for key in ("decay_factor", "plateau", "cycle_epochs"):
        del saved["config"]["schedule"][key]
    del saved["config"]["optimizer"]
    refuse_changes(saved, identity(change(schedule=ScheduleConfig(kind="step", step_epochs=(2,)))), "here")


def test_another_number_of_ranks_with_a_batch_per_rank():
    with pytest.raises(UserError) as caught:
        refuse_changes(identity(BASE, ranks=4), identity(BASE, ranks=3), "here")
    assert "was 64 and is 48" in caught.value.what
    assert "run on 4 ranks" in caught.value.fix and "train.global_batch to 64" in caught.value.fix


def test_the_ranks_that_a_plan_with_groups_needs():
    """A batch per rank is that of a group: 4 groups of 2 ranks had it, and 2 groups have half."""
    cut = change(parallel=ParallelConfig(tensor=2))
    with pytest.raises(UserError) as caught:
        refuse_changes(identity(BASE, ranks=4), identity(cut, ranks=2), "here")
    assert "run on 8 ranks" in caught.value.fix


def test_the_ranks_that_an_earlier_version_s_run_file_needs():
    """It says nothing of groups: there were none."""
    now = identity(BASE, ranks=3)
    now["config"]["parallel"] = {}
    with pytest.raises(UserError) as caught:
        refuse_changes(identity(BASE, ranks=4), now, "here")
    assert "run on 4 ranks" in caught.value.fix
