"""A Trainer that keeps only its best checkpoint; its first attempt is asked to stop between two evaluations."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from hpctrain.callbacks.transformers import SaveOnStop, newest_checkpoint

newest = newest_checkpoint("out")
print(f"from {newest}", flush=True)


class Stop(TrainerCallback):
    """Stands for the scheduler."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if newest is None and state.global_step == 12:
            os.kill(os.getpid(), signal.SIGUSR1)


rows = [{"input_ids": row, "labels": row} for row in torch.arange(256).reshape(32, 8) % 16]
settings = TrainingArguments(
    "out",
    max_steps=15,
    per_device_train_batch_size=2,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    greater_is_better=True,  # so that the first evaluation is the best
    report_to="none",
    use_cpu=True,
)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:4], callbacks=[SaveOnStop(), Stop()])
trainer.train(resume_from_checkpoint=newest)
print(f"done at {trainer.state.global_step}, best {trainer.state.best_model_checkpoint}")
