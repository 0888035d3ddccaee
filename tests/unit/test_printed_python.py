"""The Python of README and docs runs as printed: a page's blocks in order, in one namespace, in a new folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.printed import ROOT, programs_of_pages

pytestmark = [pytest.mark.usefixtures("environment_of_a_run"), pytest.mark.slow]

ELSEWHERE = {
    "README.md": "tests/dist/test_readme.py",
    "docs/keras.md": "tests/dist/test_readme.py",
    "docs/migrate.md": "tests/dist/test_migrate_page.py",
    "docs/tutorial.md": "tests/support/tutorial.py",
    "docs/hooks.md": "tests/unit/rank/test_hooks_page.py",
    "docs/metrics.md": "tests/unit/rank/test_metrics_page.py",
    "docs/own-steps.md": "tests/unit/rank/test_own_steps_page.py",
    "docs/parallel.md": "tests/unit/backends/torch/test_tensor.py",
    "docs/tensor.md": "tests/unit/backends/torch/test_tensor.py",
}
"""Tests that train with all blocks of a page."""
NOT_RUN = {
    "AutoModelForSequenceClassification": "needs a model from a server",
    "callbacks.transformers": "needs transformers: tests/slurm/test_programs_at_limits.py runs the example",
    "callbacks.lightning": "needs Lightning: the same",
    "@tf.function\ndef update": "needs 7 s for TensorFlow: it is of examples/own_loop_keras.py, which a test runs",
}
"""Blocks with this text are not run, and why."""
WAVE = "import hpctrain\nfrom tests.support.printed import write_wave\nwrite_wave()\n"
LOOP = """
import types, torch
model, criterion, global_batch = torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, 4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
BEFORE = {
    'load_config("wave.yaml", ["--train.epochs", "3"])': WAVE,
    "class TooFewGains": WAVE,
    'RunView("runs/wave").events()': f"{WAVE}hpctrain.fit(hpctrain.load_config('wave.yaml'))",
    "reviews-*.jsonl": """
from pathlib import Path
Path("reviews-1.jsonl").write_text('{"text": "good", "label": 1}')
""",
    "step = load() or 0": "load, save, train_step = lambda: 99_990, None, lambda: None",
    "callbacks.accelerate": """
import types
from pathlib import Path
class Loader(list):
    def set_epoch(self, epoch): ...
Path("checkpoints/step-99998").mkdir(parents=True)
loader, train_step = Loader(range(10)), lambda batch: None
accelerator = types.SimpleNamespace(
    skip_first_batches=lambda loader, done: loader[done:], load_state=lambda folder: None, is_main_process=True,
    save_state=lambda folder: Path(folder).mkdir(), wait_for_everyone=lambda: None)
""",
    "hpctrain.heartbeat()": "loader, train_step = range(3), lambda batch: None",
    "rehearse=one_backward_and_exchange": f"""{LOOP}
batches = [types.SimpleNamespace(x=torch.rand(4, 2), y=torch.rand(4, 1))] * 2
def one_backward_and_exchange(reducer):
    reducer.begin()
    loss = criterion(model(batches[0].x), batches[0].y)
    loss.backward()
    return reducer.exchange(loss.detach())
""",
    "optimizer.skip_synchronize()": f"""{LOOP}
import contextlib
loader = [(torch.rand(4, 2), torch.rand(4, 1))] * 3
optimizer.synchronize, optimizer.skip_synchronize = lambda: None, contextlib.nullcontext  # as in Horovod's
""",
    'Path("checkpoints/step-000000100")': """
from hpctrain import CheckpointStore
import numpy as np
store = CheckpointStore("checkpoints")
store.save({"model/weight": np.zeros((3, 4))}, meta={}, step=100)
store.close()
""",
    'tokens="mask"': f"{LOOP}loss, data = 'mse', {{'text': [[1], [2, 3]]}}",
}
"""What a page leaves to the reader, by text of the block that needs it."""
AFTER = {
    "def crop(": """
cropped = transform({"image": np.zeros((3, 256, 256))}, np.random.default_rng(0))
assert cropped["image"].shape == (3, 224, 224)""",
    "def task(world": "import types; task(types.SimpleNamespace(rank=0, size=2))",
    "class Lora": "assert task().model",
    "(labels != -100).sum()": "assert loss(torch.ones(2, 5, 7), {'labels': torch.ones(2, 5).long()})[1] == 8",
    'batch["mask"].flatten()': """
of_ones = {'next': torch.ones(2, 5).long(), 'mask': torch.ones(2, 5)}
assert loss(torch.ones(2, 5, 7), of_ones)[1] == 10""",
    "LengthGroupedSampler([len(one)": "assert task().train",
    "plateau = TorchScheduler": "assert one_cycle.make(torch.optim.SGD([torch.ones(1)], lr=0.1)).total_steps == 1000",
    "rehearse=one_backward_and_exchange": "reducer.close(); assert mean_loss > 0",
    "class Walk": "assert next(iter(Walk()))",
}
"""What a reader does next with a block's functions."""
FOUND = {name: found for name, found in programs_of_pages().items() if name.startswith(("README", "docs/"))}


def test_each_block_is_run_or_has_a_reason_why_not():
    everything = [content for found in FOUND.values() for _, content in found]
    assert len(everything) > 50
    for text in {*NOT_RUN, *BEFORE, *AFTER}:
        assert sum(text in content for content in everything) == 1, text
    for page, test in ELSEWHERE.items():
        assert Path(page).name.partition(".")[0] in (ROOT / test).read_text(encoding="utf-8"), f"{test}: {page}"


@pytest.mark.parametrize("page", sorted(FOUND.keys() - ELSEWHERE.keys()))
def test_the_blocks_of_a_page(page, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for at, content in FOUND[page]:
        if not any(text in content for text in NOT_RUN):
            for stage in (of(BEFORE, content), content, of(AFTER, content)):
                exec(compile(stage, at, "exec"), names)  # noqa: S102  programs of ours, from the docs


def of(table: dict[str, str], content: str) -> str:
    """The entry for a block; empty if there is none."""
    return next((code for text, code in table.items() if text in content), "")
