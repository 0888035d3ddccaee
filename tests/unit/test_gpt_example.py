"""The ready GPT: what rotary positions and grouped heads promise, what its file says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from examples.gpt import Block, rotate, task
from hpctrain import TorchTask, UserError, from_dataset, open_dataset, write_hdf5
from hpctrain.backends.torch.strategies.tensor import layers_to_cut
from hpctrain.cli import main


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """A file of some text."""
    (tmp_path / "a.txt").write_text("to be or not to be " * 20)
    path = str(tmp_path / "tokens.h5")
    assert main(["data", "pack", str(tmp_path / "a.txt"), "-o", path, "--context", "8"]) == 0
    return path


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_rotary_positions_tell_distances_alone():
    query, key = (drawn(1, 4)[0] for _ in range(2))
    scores = rotate(query.expand(9, 4)) @ rotate(key.expand(9, 4)).T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert scores.diagonal(0)[0] != scores.diagonal(1)[0]
    torch.testing.assert_close(rotate(query.expand(9, 4)).norm(dim=-1), query.norm().expand(9), rtol=0, atol=1e-12)


def test_each_head_of_keys_serves_its_group_of_queries():
    block = Block(16, 4, 2, 8, True, nn.RMSNorm)
    qkv = drawn(3, 5, 2, 4, 4)  # [n, t, groups, queries key value, head width]
    heads = []
    for group in range(2):
        key, value = rotate(qkv[:, :, group, 2]), qkv[:, :, group, 3]
        for query in (0, 1):
            scores = rotate(qkv[:, :, group, query]) @ key.transpose(1, 2) / 2
            later = torch.ones(5, 5, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value)
    torch.testing.assert_close(block.attended(qkv.flatten(2)), torch.cat(heads, -1), rtol=0, atol=1e-12)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"feed_forward": "gelu", "norm": "layer", "tied": True, "kv_heads": 2},
    {"hidden": 24, "dtype": "float64", "tied": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_token_sees_those_behind_it(tokens, options):
    model = task(tokens, width=16, blocks=2, **options).model
    words = torch.arange(12).reshape(1, 12)
    before = model(words)
    words[0, 7] = 99
    after = model(words)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-5)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(-1).min() > 1e-5
    assert before.dtype == (torch.float64 if "dtype" in options else torch.float32)
    assert before.shape == (1, 12, 320), "257 tokens, filled up to a multiple of 64"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
def test_all_matrices_are_cut(tokens, options, ranks):
    made = task(tokens, width=16, blocks=2, **options)
    cut = {id(one.layer) for one in layers_to_cut(made.model, made.tensor, ranks)}
    layers = [one for one in made.model.modules() if isinstance(one, (nn.Linear, nn.Embedding))]
    assert cut == set(map(id, layers))


def test_its_loss_and_metric_are_of_the_next_token(tokens):
    made: TorchTask = task(tokens, width=16, blocks=1)
    data = open_dataset(tokens).read(np.arange(4))
    batch = {name: torch.from_numpy(array) for name, array in data.items()}
    outputs = made.forward(made.model, batch)
    wanted = functional.cross_entropy(
        made.model(batch["tokens"].long())[:, :-1].flatten(0, 1), batch["tokens"].long()[:, 1:].flatten()
    )
    torch.testing.assert_close(made.loss(outputs, batch), wanted)
    best = functional.one_hot(batch["tokens"].long()[:, 1:], 320).float()
    assert made.metrics["accuracy"](best, batch) == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"width": 20, "heads": 4}, "a model of width 20 cannot have 4 heads of even width"),
        ({"kv_heads": 3}, "in groups for 3 heads of keys"),
        ({"dtype": "float16"}, "task_args.dtype is 'float16'"),
        ({"norm": "batch"}, "task_args.norm is 'batch'"),
        ({"feed_forward": "relu"}, "task_args.feed_forward is 'relu'"),
    ],
)
def test_what_it_cannot_be(tokens, options, what):
    with pytest.raises(UserError, match=what):
        task(tokens, **options)


def test_files_that_do_not_fit(tokens, tmp_path):
    write_hdf5(tmp_path / "numbers.h5", from_dataset(open_dataset({"x": np.arange(3)})))
    with pytest.raises(UserError, match=r"numbers\.h5 is not a file of tokens"):
        task(str(tmp_path / "numbers.h5"))
    with pytest.raises(UserError, match="were made with different tokenizers"):
        task(tokens, str(tmp_path / "numbers.h5"))
