"""The programs of docs/data.md and docs/streams.md do what the pages say."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.world import alone
from hpctrain.config.sections import Config, DataConfig, TrainConfig
from hpctrain.data.order import Order
from hpctrain.data.stream import StreamingData, StreamOrder, open_stream
from hpctrain.errors import UserError
from hpctrain.rank.problem import make_problem

DOCS = Path(__file__).parents[3] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "streams.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def program(containing: str) -> str:
    (found,) = (block for block in BLOCKS if containing in block)
    return found


def names_of(containing: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(program(containing), names)  # noqa: S102
    return names


def config(task: Path, **sections: Any) -> Config:
    train = TrainConfig(**sections.pop("train", {"steps": 3, "global_batch": 16}))
    return Config(name="page", task=f"{task}:task", train=train, **sections)


def test_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reviews-1.jsonl").write_text("\n".join(json.dumps({"text": "ab" * n, "label": n}) for n in range(1, 4)))
    data = names_of("def encode")["data"]
    assert [len(tokens) for tokens in data.read(np.arange(3))["tokens"]] == [2, 4, 6]


def test_samplers():
    names = names_of("WeightedSampler(")
    drawn = Order(4, 4000, sampler=lambda epoch: np.concatenate([names["balanced"](epoch) for _ in range(1000)]))
    assert 0.45 < np.mean(drawn.batch_indices(0, 0) == 3) < 0.55
    assert sorted(Order(4, 4, sampler=names["grouped"]).batch_indices(0, 0)) == [0, 1, 2, 3]
    curriculum = Order(4, 4, sampler=names["easy_first"])
    assert set(curriculum.batch_indices(0, 0)) == {1} and sorted(curriculum.batch_indices(7, 0)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_variable_length(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "padded_task.py"
    path.write_text(program("def task(lr"))
    problem = make_problem(config(path), alone())
    from hpctrain.rank.batches import make_data

    data = make_data(problem, alone(), lambda samples: samples)
    batch = next(data.starting_at(0, 0)).micro_batches[0]
    data.close()
    assert batch["tokens"].shape[1] in (8, 16, 24)
    assert batch["mask"].sum(1).tolist() == batch["label"].tolist()


@pytest.mark.slow
def test_streams(tmp_path):
    pytest.importorskip("torch")
    walk = names_of("class Walk")["Walk"]
    data = StreamingData(open_stream(walk()), StreamOrder(4), 0, 1)
    whole = [batch.micro_batches[0]["y"].tolist() for batch in islice(data.starting_at(0, 0), 4)]
    data.close()
    data = StreamingData(open_stream(walk()), StreamOrder(4), 0, 1)
    list(islice(data.starting_at(0, 0), 2))
    data.close()
    resumed = StreamingData(open_stream(walk()), StreamOrder(4), 0, 1)
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert [batch.micro_batches[0]["y"].tolist() for batch in islice(resumed.starting_at(0, 2), 2)] == whole[2:]
    resumed.close()
    path = tmp_path / "walking_task.py"
    path.write_text(
        "import torch, hpctrain\n" + program("class Walk") + "def task(where='train', **more):\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    data = {'train': {'x': [[1.0]], 'y': [[1.0]]}, where: Walk()}\n"
        "    if more: data['sampler'] = hpctrain.WeightedSampler([1.0])\n"
        "    return hpctrain.TorchTask(model, lambda output, batch: output.mean(), optimizer, **data)\n"
    )
    assert make_problem(config(path), alone()).fingerprint()
    refused = {
        "train.epochs": config(path, train={"epochs": 1, "global_batch": 4}),
        "data.workers": config(path, data=DataConfig(workers=1)),
        "the task has a sampler": config(path, task_args={"more": True}),
        "validation data": config(path, task_args={"where": "validation"}),
    }
    for key, wrong in refused.items():
        with pytest.raises(UserError, match=f"{key}.*stream|stream.*{key}"):
            make_problem(wrong, alone())
